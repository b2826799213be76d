"""Groups of tensors: the ways to synchronise one, and the rules and layouts that make them."""
