"""Prompt for Fact (Pervasive Context Management §4.1): which prompt makes a model the best checker of claims?

claims.py      labelled claims from a file
prompts.py     prompt templates and the words that answer them
verify.py      the context and the decorated function: what runs beside the model
statistics.py  answers, intervals, confusion matrices, paired comparison
results.py     the rows of the final file, and the figures of the report made from them
report.py      the report as text
run.py         one run from options to report
cli.py         `stoker run fact_verification`
"""
