"""The machine that a process runs on: its ports, files and child processes."""
