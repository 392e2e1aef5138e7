module deltafold.test/unpack

go 1.21
