"""Drills: a private cluster of real processes, killed at random, and what must hold of the training afterwards.

`schedule`, `evidence`, `invariants` and `figures` are pure; `cluster`, `strikes` and `conduct` start and kill.
"""
