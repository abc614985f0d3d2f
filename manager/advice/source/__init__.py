"""The facts of a function and its context, from their source: nothing is imported, nothing is run.

reading.py     files inside the user's folders, config files, and values in a source
scan.py        signatures, constants, options and calls of the functions that the entry uses
facts.py       the schema: model, task, data, batch size, length, precision; which calls, names and keywords tell which
extractor.py   all of these together: `extract_facts`, and the normalised source
agent.py       an optional language model that fills the open facts
"""
