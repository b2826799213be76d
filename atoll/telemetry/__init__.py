"""Limits of telemetry, and its export to Prometheus."""
