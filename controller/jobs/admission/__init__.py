"""Admission of devices: which take part in a running job, which wait, which are sent back."""
