"""The cost of generations: the memory they take, the time they take from training, and so how often one is written."""
