"""A cluster in simulated time, deterministic from a seed, under the real estimators and planners."""
