"""What steps of a model's engine take, measured on a device of a session: `stoker profile`.

functions.py    the decorated function: what is called on a pilot
run.py          one profile, from its options to its tables
cli.py          `stoker profile`
"""
