"""The state between two steps: kept, told apart, saved where training ends."""
