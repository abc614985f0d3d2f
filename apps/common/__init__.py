"""Code that several applications share.

`runner.py` runs an application: it opens or resumes the run's folder, makes the calls, keeps results, and reports. The
modules `openai_*.py` and `refusals.py` implement OpenAI's API. `answer_parsing.py` finds reasoning, text and function
calls in a model's text, with the parsers in `tool_calls.py`, `xml_calls.py` and `reasoning.py`.
"""
