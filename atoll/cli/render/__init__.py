"""Presents jobs, nodes and events to people and to scripts."""
