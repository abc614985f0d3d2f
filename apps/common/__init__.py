"""Code shared by the applications.

runner.py          one run: open or resume its folder, make its calls, keep results, report
calls.py           results as they arrive; stop on signals; one call that measures a model
command_line.py    options of all runs, and the next command to type
batch_state.py     files through which a `stoker batch` and a gateway communicate
data_rows.py       rows of a data file, checked
models_file.py     models.toml
openai_requests.py OpenAI's API: requests
openai_messages.py, openai_tools.py   its messages; its tools, and schemas of calls that a request requires
refusals.py        its errors
openai_answers.py  OpenAI's API: how a model answers, and the bodies of answers
tool_prompts.py    messages and tools as a chat template gets them
answer_parsing.py  reasoning, text and function calls in a model's text
tool_calls.py, xml_calls.py, reasoning.py   parsers of the formats of calls and of reasoning
"""
