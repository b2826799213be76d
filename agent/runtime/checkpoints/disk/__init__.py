"""Checkpoints on disk and in object stores: whole or not at all, verified when read, fenced against older runs.

What only looks at them (`listing`, `retention`, `store`) needs no torch: the agent's daemon does that too."""
