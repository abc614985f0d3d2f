"""The Prompt Bank (PromptTuner §4.3) finds a good initial prompt for a new task. A search scores only a few of the
bank's thousands of prompts.

`layers.py` and `lookup.py` access no files and no models. `store.py` stores one bank per model on disk.
"""
