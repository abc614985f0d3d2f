"""`make gpu`: run the site suite, GPU tests and GPU benchmarks on this machine in eight minutes.

`run.py` runs each part in a process with a time limit. `--rehearse` runs all parts on CPU devices with tiny models.
"""
