"""Start, watch and stop the workers of one node, and forward their messages."""
