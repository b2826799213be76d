"""Strategy `stale-sparse`: sparse updates with error feedback, applied while the next step already runs.

Source: StellaTrain (SIGCOMM '24), section 3. docs/strategies.md has the guarantees and their limits."""
