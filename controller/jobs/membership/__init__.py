"""The views of a run: who is in them, and what comes next."""
