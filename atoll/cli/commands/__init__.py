"""The commands, grouped by what they act on: thin shells around the client and the daemons."""
