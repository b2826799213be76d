"""The model and its optimizer as checkpoints, recovery and steps see them."""
