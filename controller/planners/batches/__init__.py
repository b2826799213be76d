"""Split a step's batch among unequal devices, and choose its size."""
