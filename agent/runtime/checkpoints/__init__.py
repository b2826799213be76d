"""Checkpoints: when they are taken and restored; `disk/` and `memory/` hold the two tiers."""
