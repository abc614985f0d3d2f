"""`make gpu`: every GPU test and the short form of every GPU benchmark, on whatever GPU is here, in eight minutes.

    run.py      the parts one after the other, each a process with its own limit; the record and the page (standard
                library alone: it runs before anything is installed)
    kit.py      `make gpu-kit`: wheels of what a machine without a network may lack
    parts.py    what each part measures
    model.py    a language model with random weights, of a wanted size
    page.py     the record as a page

`--rehearse` runs all of it without a GPU: on CPU devices, and where memory of a GPU is meant, over the stand-in driver
of tests/driver. The record says so.
"""
