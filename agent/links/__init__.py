"""Links to other nodes: agents measure round-trip time and bandwidth between each other."""
