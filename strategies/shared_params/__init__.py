"""Worker parts of strategies whose ranks share shared parameters: what leaves of each rank, and how it comes into
all."""
