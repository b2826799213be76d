"""The worker's link to its agent: who it is, what it tells, how it ends."""
