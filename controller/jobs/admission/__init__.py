"""Which devices take part in a running job, which wait, which are sent back."""
