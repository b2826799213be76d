"""The times of a step, and what is told of them."""
