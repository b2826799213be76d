"""Measures this node's devices, and collects what its workers measure."""
