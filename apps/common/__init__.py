"""Code that several applications share.

`runner.py` runs an application. The modules `openai_*.py` and `refusals.py` implement OpenAI's API. `answer_parsing.py`
finds reasoning, text and function calls in a model's text.
"""
