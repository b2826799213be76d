"""The commands, one file each: thin shells around the client and the daemons."""
