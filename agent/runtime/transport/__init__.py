"""The transport between the workers of a run: frames over ZeroMQ between nodes, shared memory inside one."""
