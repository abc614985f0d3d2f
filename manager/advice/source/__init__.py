"""Read facts of a function and its context from their source code. No code is imported or executed.

reading.py     files, modules and configs in the user's folders, and their values
scan.py        scan the functions that the entry function uses
facts.py       the facts (model, task, data, batch size, ...), and the names that show them
extractor.py   `extract_facts`, and the normalised source code; agent.py: a language model adds facts
"""
