"""SLINFER's evaluation in the simulator: `tables.py` has the cases."""
