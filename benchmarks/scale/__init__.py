"""The simulator, and decisions for a large cluster."""
