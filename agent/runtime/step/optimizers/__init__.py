"""The optimizers of a run around their updates: seen as one, scaled, left out, muted."""
