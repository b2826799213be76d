"""Shards of a generation: the layout of the state, the file that holds one rank's part, the files of a job."""
