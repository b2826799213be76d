"""Strategy `dense`: every step all-reduces whole gradients."""
