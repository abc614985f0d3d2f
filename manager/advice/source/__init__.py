"""What a function and its context are, from their source alone: nothing is imported, nothing is run.

facts.py       the schema: model, task, data, batch size, length, precision, ... each with its place and its certainty
reading.py     files inside the user's own folders, within bounds
values.py      what an expression of the source can stand for
normalise.py   source without comments, docstrings and names of variables, so that such edits change nothing
evaluator.py   expressions to values, as far as the source tells
walker.py      statements in the order in which they run, into the user's own functions
options.py     argparse, click and dataclasses, with a command line over their defaults
configs.py     JSON, TOML and YAML files that the source opens
recognise.py   which calls, names and keywords tell which fact
extractor.py   all of these together: `extract_facts`
agent.py       an optional language model that fills what the extractor leaves open
endpoint.py    its endpoint, within time and tokens; believing.py: its answers held to the source
"""
