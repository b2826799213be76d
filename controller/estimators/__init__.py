"""Telemetry to profile: what was measured of devices. Pure and incremental."""
