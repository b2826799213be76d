"""Pipelines: a model in stages, each on a worker of its own; what executes them, whichever strategy averages."""
