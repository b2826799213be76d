"""Rules that group replicas, held against each other: rounds, and the held-out loss of the one model at their ends."""
