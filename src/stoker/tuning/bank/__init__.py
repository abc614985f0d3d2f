"""The Prompt Bank (PromptTuner §4.3) finds a good initial prompt for a new task, and scores few of its thousands of
prompts.

`layers.py` and `lookup.py` are pure. `store.py` stores one bank per model on disk.
"""
