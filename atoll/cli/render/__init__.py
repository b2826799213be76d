"""What people and scripts see of jobs, nodes and events."""
