"""Virtual environments of jobs: packages that a job's workers import in addition to the agent's."""
