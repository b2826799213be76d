"""Connections between machines: gRPC and the limits of messages."""
