"""What the applications share.

runner.py          one run: open or resume its folder, make its calls, keep results, report
calls.py           calls whose results come as they are ready; stop on signals; one call that measures a model
command_line.py    the options that all runs have, and what to type next
batch_state.py     what a `stoker batch` and a gateway tell each other through files
data_rows.py       the rows of a data file, checked
models_file.py     models.toml
openai_requests.py OpenAI's API: what a request may ask
openai_answers.py  how a model answers a request, and the bodies of answers
"""
