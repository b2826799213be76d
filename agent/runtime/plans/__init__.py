"""The plan of each step, and the schedule from which a plan is read."""
