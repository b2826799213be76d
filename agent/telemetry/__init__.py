"""What this node has, and what its workers measure."""
