"""Worker parts of strategies that sum tensors by messages in stages: the messages received but not used yet."""
