"""Advice (SchedMate): what the code says, what the logs say, why something failed. Read only, never waited for.

source/      what a function and its context are, from their source: model, data, length, precision (paper §3.1)
estimates/   what similar recipes took before, with its spread (§3.1)
metrics/     loss, steps, tokens a second and time left, from what a program prints (§3.2)
logs/        the first lines of a log that matter, and whose fault they are (§3.3)

Sections are those of "Semantic-Aware Scheduling for GPU Clusters with Large Language Models".
"""
