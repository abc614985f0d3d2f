"""SchedMate's evaluations, on collections of our own."""
