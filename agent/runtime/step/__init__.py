"""The life of a step: boundary, backward pass, update, and the plans that change them."""
