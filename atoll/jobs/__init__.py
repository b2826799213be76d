"""Facts about a job that users, controller and agents share."""
