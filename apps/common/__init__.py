"""Shared by the applications.

runner.py          one run: open or resume its folder, make its calls, keep results, report
calls.py           results as they arrive; stop on signals; one call that measures a model
command_line.py    options of all runs, and the next command to type
batch_state.py     files through which a `stoker batch` and a gateway communicate
data_rows.py       rows of a data file, checked
models_file.py     models.toml
openai_requests.py OpenAI's API: requests
openai_answers.py  OpenAI's API: how a model answers, and the bodies of answers
"""
