"""The Prompt Bank (PromptTuner §4.3): a good initial prompt for a new task, found by few scores among thousands.

candidates.py a prompt, its origin, and the prompts of a file; the shipped ones
layers.py     features, K-medoids, representatives and their clusters: insertion and replacement (pure)
lookup.py     the search by score (pure)
store.py      a bank on disk: one a model, shared by processes
build.py      features and scores from a language model; a bank on first use
"""
