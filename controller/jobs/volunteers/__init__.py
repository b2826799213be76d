"""Devices that may vanish at any moment: never ranks of a run, they help runs whose strategy takes help."""
