"""Worker parts of strategies whose ranks share masters: what leaves of each rank, and how it comes into all."""
