"""Measure the simulator, and decisions for a large cluster."""
