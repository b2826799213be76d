"""Virtual environments of jobs: what a job's workers import beside what their agent has."""
