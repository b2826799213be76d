"""Copies of shards between machines: placement, sender and links, seals, idle spans."""
