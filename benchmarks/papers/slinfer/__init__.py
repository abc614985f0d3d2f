"""SLINFER's evaluation in the simulator. `tables.py` contains the cases."""
