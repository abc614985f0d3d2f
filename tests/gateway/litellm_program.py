"""A program of litellm's user against a gateway, whose address is in OPENAI_BASE_URL."""

import json

import litellm

MESSAGES = [{"role": "user", "content": "What is it?"}]
TOOL = {"type": "function", "function": {"name": "f"}}

asked = {"model": "openai/small", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
whole = litellm.completion(**asked)
assert whole.usage.completion_tokens
pieces = litellm.completion(**asked, stream=True, stream_options={"include_usage": True})
text = "".join(one.choices[0].delta.content or "" for one in pieces if one.choices)
assert text == whole.choices[0].message.content
assert len(litellm.embedding(model="openai/vectors", input=["a", "b"]).data) == 2
tools = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
[call] = litellm.completion(**{**asked, "max_tokens": 400}, **tools).choices[0].message.tool_calls
assert (call.function.name, json.loads(call.function.arguments)) == ("f", {})
try:
    litellm.completion(**{**asked, "model": "openai/other"})
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("a model that the gateway does not serve was found")
