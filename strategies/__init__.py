"""Strategies: one folder a method, both halves together. `registry.py` is the only list."""
