"""Train one PyTorch model across islands of unequal devices."""
