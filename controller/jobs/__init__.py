"""Jobs and their runs: what is wanted against what is seen, and what to do about it."""
