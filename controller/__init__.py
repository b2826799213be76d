"""The daemon on the head node: it watches, decides and pushes decisions to agents. Runs without torch."""
