"""Planner `tta`: the batch and the compression that reach a loss soonest."""
