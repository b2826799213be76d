"""Worker parts of strategies that sum tensors by messages in stages: what came and waits to be used."""
