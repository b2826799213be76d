"""Sums of groups over all ranks: messages, who sends whom what, and the thread that does it."""
