"""Sum groups over all ranks: messages, the order of exchange, and the thread that carries it out."""
