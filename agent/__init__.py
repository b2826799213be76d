"""The daemon on each node, and `runtime/` inside the worker. The daemon never imports torch, the runtime never grpc."""
