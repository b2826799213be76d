"""A pipeline of two stages whose servers volunteers help, in processes of their own; volunteer_processes.py runs it."""
