"""Groups of tensors: the ways to synchronise one, the rules and layouts that make them."""
