"""Evaluations of SchedMate on our collections."""
