module deltafold.test/etcd

go 1.26

require (
	go.etcd.io/etcd/etcdutl/v3 vVERSION
	go.etcd.io/etcd/server/v3 vVERSION
)
