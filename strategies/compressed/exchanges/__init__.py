"""Sum groups over all ranks: messages, and the order of exchange."""
