"""The cost of generations: the memory they take, and the time they take from training."""
