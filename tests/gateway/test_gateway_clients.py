"""Third-party clients, where installed, need only the gateway's address."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("openai", "httpx", "starlette", "uvicorn", "prometheus_client", "torch", "transformers"))):
    pytest.skip("needs the extras serve, models and test", allow_module_level=True)

import openai
from gateway.running import LIMIT_S

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.skipif(find_spec("litellm") is None, reason="litellm is not installed")
def test_litellm(gateway, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask another site for prices
    import litellm

    there = {"api_base": f"{gateway.url}/v1", "api_key": "none", "timeout": LIMIT_S}
    asked = {"model": "openai/small", "messages": QUESTION, "max_tokens": 6, "temperature": 0, **there}
    whole = litellm.completion(**asked)
    assert whole.usage.completion_tokens
    pieces = litellm.completion(**asked, stream=True, stream_options={"include_usage": True})
    text = "".join(one.choices[0].delta.content or "" for one in pieces if one.choices)
    assert text == whole.choices[0].message.content
    assert len(litellm.embedding(model="openai/vectors", input=["a", "b"], **there).data) == 2
    with pytest.raises(litellm.BadRequestError, match="tools asks for calls of tools"):
        litellm.completion(**asked, tools=[TOOL])
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": "openai/other"})


@pytest.mark.skipif(find_spec("langchain_openai") is None, reason="langchain-openai is not installed")
def test_langchain(gateway):
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    there = {"base_url": f"{gateway.url}/v1", "api_key": "none", "timeout": LIMIT_S}
    chat = ChatOpenAI(model="small", max_tokens=6, temperature=0, stream_usage=True, **there)
    whole = chat.invoke([("system", "Be brief."), ("human", "?")])
    assert whole.usage_metadata["output_tokens"]
    first, *rest = chat.stream([("system", "Be brief."), ("human", "?")])
    for piece in rest:
        first = first + piece
    assert (first.content, first.usage_metadata) == (whole.content, whole.usage_metadata)
    # Without this it sends token ids of OpenAI's tokenizer, which mean other words to other models.
    vectors = OpenAIEmbeddings(model="vectors", check_embedding_ctx_length=False, **there)
    assert len(vectors.embed_documents(["a", "b"])) == 2
    with pytest.raises(openai.BadRequestError, match="tools asks for calls of tools"):
        chat.bind_tools([TOOL]).invoke("?")
