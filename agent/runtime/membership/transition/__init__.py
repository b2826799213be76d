"""The way of a worker from one view of its run to the next."""
