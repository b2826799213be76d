"""The life of jobs and runs: phases, reconciling, launching, failures, recovery."""
