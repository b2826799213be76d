"""The training API: `atoll.init` and `atoll.Run`, and what they check and remember."""
