"""Timeline of a model's backward pass and the synchronisation of its gradients, and searches on it. Native.

Times are in seconds, sizes in bytes, tensors in the order of the backward pass. _native.pyi has the contracts."""

from __future__ import annotations

from atoll.kernels._native import Timeline, fuse

__all__ = ["DEVICE", "Timeline", "fuse"]

DEVICE = 0
"""Number of the resource that runs the backward passes."""
