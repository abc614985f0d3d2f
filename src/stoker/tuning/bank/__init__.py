"""The Prompt Bank (PromptTuner §4.3) finds a good initial prompt for a new task among thousands, by scoring few of
them.

candidates.py prompts and their origin; the shipped prompts
layers.py     features, K-medoids, clusters; insertion and replacement (pure)
lookup.py     the search by score (pure)
store.py      a bank on disk: one per model, shared by processes
build.py      features and scores from a language model; building a bank
"""
