"""SchedMate's evaluations on our own collections."""
