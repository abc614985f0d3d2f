"""Prompt tuning with deadlines (PromptTuner): soft prompts tuned over real data, begun from a good text.

bank/    candidates for initial prompts, and the search among them by score
tuning/  the tuning of a soft prompt
"""
