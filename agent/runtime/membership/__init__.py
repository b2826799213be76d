"""The change of a run's members without a new process: from a lost peer to the first step of the next view."""
