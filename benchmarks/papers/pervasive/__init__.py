"""Evaluations of Pervasive Context Management in the simulator."""
