"""Checkpoints as their owners name and keep them: sources to start from, models to take along."""
