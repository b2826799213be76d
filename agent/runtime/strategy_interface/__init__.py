"""The interface that a strategy's worker half implements."""
