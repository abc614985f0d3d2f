"""`make gpu`: the site suite, the GPU tests and figures, on the GPU that is here, in eight minutes.

`run.py` runs the parts, each in a process with a limit; it needs the standard library only, since it runs before
anything is installed. `budget.py` has the parts; `*_parts.py` are the parts by subject. `--rehearse` runs all on CPU
devices with tiny models.
"""
