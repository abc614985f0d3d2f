"""What a function and its context are, from their source alone: nothing is imported, nothing is run.

facts.py       the schema: model, task, data, batch size, length, precision, ... each with its place and its certainty
reading.py     files inside the user's folders, within bounds
literals.py    values that stand in the source, and config files
scan.py        signatures, constants, options and calls of the functions that the entry uses
recognise.py   which calls, names and keywords tell which fact
extractor.py   all of these together: `extract_facts`, and the source without comments and names of variables
agent.py       an optional language model that fills what the scan leaves open
"""
