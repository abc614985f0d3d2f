"""Evaluations of five papers in the simulator. The pages are in `docs/reproduction`."""
