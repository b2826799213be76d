"""The WAN laboratory behind benchmarks/wan.py: a network of namespaces, and training runs in it."""
