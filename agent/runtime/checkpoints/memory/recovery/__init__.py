"""Recovery from memory: the generations that all ranks hold together, read and put together again."""
