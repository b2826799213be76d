"""The cluster that a command talks to, or runs on this machine."""
