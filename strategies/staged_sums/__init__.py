"""Worker parts of strategies that sum tensors by messages in stages: the exchange's thread, and its mailbox."""
