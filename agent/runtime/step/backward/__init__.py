"""The backward pass of a step: hooks in, reduced gradients out, and what is refused or measured on the way."""
