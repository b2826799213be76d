"""The drivers of a training step, one for each capability of a strategy."""
