"""Choose the strategy in which a job trains, from predicted steps and what a step of each strategy teaches."""
