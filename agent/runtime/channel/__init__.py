"""The channel between ranks, and the agreement that travels on it."""
