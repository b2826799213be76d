"""Starts, watches and stops the workers of one node, and carries what they say."""
