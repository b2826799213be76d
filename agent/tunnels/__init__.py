"""Passages: ways from a worker to one of another machine that cannot be dialled, through the relay."""
