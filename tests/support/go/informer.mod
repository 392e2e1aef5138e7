module deltafold.test/informer

go 1.26

require (
	k8s.io/api VERSION
	k8s.io/apimachinery VERSION
	k8s.io/client-go VERSION
)
