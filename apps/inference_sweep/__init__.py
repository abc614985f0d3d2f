"""Models x prompts x generation parameters over the rows of a data file.

plan.py      the sweep file, and the calls that it comes to
generate.py  what runs beside a model
results.py   from what calls bring back to the rows of the final file
run.py       one sweep from its file to its results
cli.py       `stoker run inference_sweep`
"""
