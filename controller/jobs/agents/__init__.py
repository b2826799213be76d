"""What agents say and hold: sessions, progress, copies of state, keys."""
