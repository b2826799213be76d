"""Jobs and their runs: wanted against observed state, and what follows."""
