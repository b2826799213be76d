"""Processes of workers: how they start, in which environment, how they end."""
