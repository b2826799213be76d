"""The runtime inside a worker: the training API's other side. The only part of the agent that imports torch."""
