"""Adapters: scripts of other frameworks on Atoll's data plane, with a line or two more than they have."""
