"""Assign devices to pipeline stages, and form the groups in which replicas of a stage average."""
