"""Estimate the profile of a run from its telemetry. Pure and incremental."""
