"""Traces: what is recorded of a job as OpenTelemetry spans."""
