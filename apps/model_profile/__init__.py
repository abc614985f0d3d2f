"""Measure the step times of a model's engine on a device of a session: `stoker profile`.

functions.py    the decorated function that runs on a pilot
run.py          one profile, from its options to its tables
cli.py          `stoker profile`
"""
