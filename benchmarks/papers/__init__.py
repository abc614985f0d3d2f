"""Evaluations of five papers in the simulator, with pages in `docs/reproduction`."""
