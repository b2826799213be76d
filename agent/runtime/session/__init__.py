"""The facts that one worker has of its run: its place, its agent, its group, its settings."""
