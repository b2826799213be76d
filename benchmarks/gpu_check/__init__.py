"""Checks what Atoll does on a GPU, in stages: scripts/gpu-check."""
