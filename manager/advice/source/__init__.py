"""Facts of a function and its context, from their source. No code is imported or executed.

reading.py     files in the user's folders, config files, and values in a source
scan.py        signatures, constants, options and calls of the functions that the entry uses
facts.py       the schema (model, task, data, batch size, length, precision), and names that show each fact
extractor.py   `extract_facts`, which combines these modules, and the normalised source
agent.py       an optional language model that fills missing facts
"""
