"""`make gpu`: the site suite, the GPU tests and figures, on the GPU that is here, in eight minutes.

    run.py          runs the parts, each in a process with a limit; writes the record and the page (standard library
                    only, since it runs before anything is installed)
    budget.py       the parts, their order, their needs and their share of the time
    suites.py       the site suite and the tests with the marker `gpu`, as parts
    bars.py         the bars, computed from a record
    page.py         a record as a page
    kit.py          `make gpu-kit`: wheels for a machine without a network
    parts.py        runs one part; `*_parts.py` are the parts by subject
    place.py        the folder, the session and the clock of a part
    model.py        language models with random weights

`--rehearse` runs all of it on CPU devices with tiny models. The record says so.
"""
