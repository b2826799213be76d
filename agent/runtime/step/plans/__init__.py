"""The plans of a run: arriving, agreed on, and in force from a step on."""
