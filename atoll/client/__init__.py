"""The client of a controller, and how a job is described and submitted."""
