"""Certificates, revocation and tickets."""
