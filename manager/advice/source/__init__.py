"""Read facts of a function and its context from their source code. No code is imported or executed.

reading.py     read the user's folders, modules and config files
values.py      values in source code
scan.py        scan signatures, constants, options and calls of the functions that the entry function uses
facts.py       the facts (model, task, data, batch size, length, precision), and the names that show each fact
extractor.py   `extract_facts`, which combines these modules, and the normalised source code
agent.py       an optional language model that adds missing facts
"""
