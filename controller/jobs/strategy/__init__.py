"""Choose the strategy of a job that leaves it to the controller: at launch, and again while it trains."""
