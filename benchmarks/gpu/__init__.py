"""`make gpu`: the site suite, the GPU tests and figures on this machine's GPU, in eight minutes.

`run.py` runs the parts, each in a process with a time limit. `--rehearse` runs all parts on CPU devices with tiny
models.
"""
