"""The Prompt Bank (PromptTuner §4.3): a good initial prompt for a new task, found by few scores among thousands.

candidate.py  a prompt, where it is from, and the prompts of a file
features.py   features as they are compared: scaled, of length one
medoids.py    K-medoids (pure)
layers.py     representatives, their clusters, and groups in large clusters: insertion and replacement (pure)
lookup.py     the search by score (pure)
frames.py     an append-only file of checked records
store.py      a bank on disk: one a model, shared by processes
build.py      features of many prompts, kept by content; a bank on first use
scoring.py    features and scores from a causal language model
"""
