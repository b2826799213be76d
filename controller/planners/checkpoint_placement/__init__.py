"""Choose whose memory holds the replicas of whose checkpoint."""
