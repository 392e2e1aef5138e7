module deltafold.test/kube-apiserver

go 1.26

require k8s.io/kubernetes VERSION

