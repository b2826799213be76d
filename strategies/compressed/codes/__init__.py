"""Algorithms that compress gradients."""
