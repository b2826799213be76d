"""Agents as the controller knows them: sessions, progress, copies of state, keys."""
