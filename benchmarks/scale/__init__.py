"""The simulator, and decisions at the size of a large cluster."""
