"""Give the scheduler advice (SchedMate) from code, logs and history. The scheduler never waits for advice.

source/         facts of a function and its context, from their source code (paper §3.1)
similar.py      recipes with similar facts; estimating.py: the cost of a recipe from similar recipes (§3.1)
metrics/        loss, steps, tokens per second and time left, from printed lines (§3.2)
logs/           the cause of a failure, from a log (§3.3); judging.py: from several logs
endpoint.py     the language model that gives advice; secrets.py: hides secrets from the model
answers.py      the advisor process (main.py)

Sections refer to "Semantic-Aware Scheduling for GPU Clusters with Large Language Models".
"""
