module deltafold.test/kubernetes

go 1.26

require k8s.io/kubernetes VERSION

