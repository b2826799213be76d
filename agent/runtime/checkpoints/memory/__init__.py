"""Checkpoints in the memory of machines: every rank writes its part of the state at step boundaries, into files of its
agent's that outlive the worker. docs/checkpoints.md says what survives what."""
