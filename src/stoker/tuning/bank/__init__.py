"""The Prompt Bank (PromptTuner §4.3) finds a good initial prompt for a new task among thousands, by scoring few of
them.

`layers.py` and `lookup.py` are pure; `store.py` keeps one bank per model on disk.
"""
