"""Choose which gradients are compressed, how they are sent, and which are sent as one."""
