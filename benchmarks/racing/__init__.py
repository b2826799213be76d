"""The race: methods of exchange between islands, judged by the held-out loss of the one model that they share."""
