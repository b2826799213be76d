"""Worker parts of strategies whose ranks share parameters: what each rank sends, and how every rank applies it."""
