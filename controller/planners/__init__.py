"""Profile to plan: pure functions with a JSON form; no I/O, no clock, no torch."""
