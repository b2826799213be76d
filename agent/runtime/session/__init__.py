"""What one worker knows of its run: its place, its agent, its group, its settings."""
