"""Samples and batches: which rank trains which."""
