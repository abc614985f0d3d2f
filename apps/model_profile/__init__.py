"""What steps of a model's engine take, measured on a device of a session: `stoker profile`.

functions.py    what runs on a pilot
tables.py       what was measured, as people read it
run.py          one profile, from its options to its table
cli.py          `stoker profile`
"""

from __future__ import annotations
