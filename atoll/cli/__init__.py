"""The `atoll` command: thin shells around the client and the daemons. Modules import what is heavy only when used."""
