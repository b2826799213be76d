"""Everything the controller keeps: what is written to etcd, under which keys, and who may write it."""
