"""Evaluations of five papers in the simulator, one folder each; `docs/reproduction` has the pages."""
