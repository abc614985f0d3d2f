"""SLINFER's evaluation in the simulator: `tables.py` has the cases, `cases.py` one run, `report.py` the page."""
