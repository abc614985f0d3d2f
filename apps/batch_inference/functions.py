"""The functions of this application that run on a pilot: what stays hot there, and what is called.

    recipe = model_recipe(language_model, "models/small")       a value: nothing is loaded yet
    answered = answer.with_options(context=recipe)              the same function, on that model
    embedded = embed.with_options(context=encoder("models/e5")) vectors, of an encoder

A batch makes a recipe of each of its models and maps `answer` or `embed` over its requests: `run.py` does so. A call is
one request. The loader under `@context` runs once in a process on a pilot; the function under `@app` gets what it
returned as its first argument.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from stoker import app, context
from stoker.apps.batch_inference.request import ApiError, BatchRequest, Endpoint, SamplingOptions
from stoker.contexts import load_causal_lm

if TYPE_CHECKING:
    from stoker.contexts import CausalLM

Likelihoods = tuple[tuple[str, float, tuple[tuple[str, float], ...]], ...]
"""Of each token its text, its log-likelihood, and the likeliest tokens there with theirs."""
_PARAMS = {Endpoint.CHAT: "messages", Endpoint.COMPLETIONS: "prompt", Endpoint.EMBEDDINGS: "input"}
_UNKNOWN_LENGTH = 4096
"""The length of a model that does not say how many tokens it reads."""


class CompletedText(Protocol):
    """What a causal LM context brings back of a prompt, as `stoker.contexts.language_model` has it."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: Likelihoods


class BatchModel(Protocol):
    """What a causal LM context offers to this application."""

    model: Any

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        """The prompt that puts a conversation in the model's own chat format."""

    def count_tokens(self, text: str) -> int:
        """The length of a prompt in tokens."""

    def complete(
        self, prompt: str, *, max_new_tokens: int, temperature: float, top_p: float, seed: int, stop: tuple[str, ...],
        logprobs: int, json_schema: str,
    ) -> CompletedText:  # fmt: skip
        """What the model writes after a prompt. Raises ValueError for a prompt or a wish that it cannot take."""


class Choice(msgspec.Struct, frozen=True):
    """What the model wrote after one prompt. `finish_reason`: `stop` or `length`. `logprobs` is None unless it was
    asked for."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: Likelihoods | None = None


class Embedder(Protocol):
    """What an encoder context offers to this application. `longest`: the tokens that it reads; 0 is any number."""

    longest: int

    def count_tokens(self, text: str) -> int:
        """The length of a text in tokens."""

    def embed(self, texts: list[str]) -> list[list[float]]:
        """A vector a text. Raises ValueError for a text that it cannot take."""


class BatchAnswer(msgspec.Struct, frozen=True):
    """What a call brings back: a choice a prompt or a vector a text, or why there is none; when it ended (epoch) and
    what it took. `packed` is the request's; `read_tokens` are those of texts that have vectors."""

    custom_id: str
    line: int
    endpoint: Endpoint
    model: str
    choices: list[Choice]
    error: ApiError | None
    ended_at: float
    infer_s: float
    vectors: list[list[float]] = []
    read_tokens: int = 0
    packed: bool = False


@context
def language_model(
    path: str, *, dtype: str = "auto", snapshot: bool = True, threads: int = 0, engine: str = "auto"
) -> CausalLM:
    """Load the model once, into a process that then serves call after call."""
    return load_causal_lm(path, dtype=dtype, snapshot=snapshot, threads=threads, engine=engine)


@app
def answer(model: BatchModel, request: BatchRequest) -> BatchAnswer:
    """Has the model answer one request. What the model refuses is an answer too; nothing else is caught here."""
    begun = time.perf_counter()
    choices: list[Choice] = []
    error: ApiError | None = None
    try:
        for place, prompt in enumerate(_prompts(model, request)):
            choices.append(complete(model, prompt, request.sampling, place=place))
    except ValueError as refusal:
        choices, error = [], _as_api_error(refusal, request)
    return BatchAnswer(
        custom_id=request.custom_id,
        line=request.line,
        endpoint=request.endpoint,
        model=request.model,
        choices=choices,
        error=error,
        ended_at=time.time(),
        infer_s=time.perf_counter() - begun,
    )


@app
def embed(model: Embedder, request: BatchRequest) -> BatchAnswer:
    """Has the model embed the texts of one request."""
    begun = time.perf_counter()
    vectors: list[list[float]] = []
    tokens = 0
    error: ApiError | None = None
    try:
        for text in request.texts:
            length = model.count_tokens(text)
            if 0 < model.longest < length:
                raise ContextTooShort(f"the model reads {model.longest} tokens, and a text has {length}")
            tokens += length
        vectors = model.embed(list(request.texts))
    except ValueError as refusal:
        error = _as_api_error(refusal, request)
    return BatchAnswer(
        custom_id=request.custom_id,
        line=request.line,
        endpoint=request.endpoint,
        model=request.model,
        choices=[],
        error=error,
        ended_at=time.time(),
        infer_s=time.perf_counter() - begun,
        vectors=vectors,
        read_tokens=tokens,
        packed=request.packed,
    )


class ContextTooShort(ValueError):
    """A prompt and what may follow it are longer than what the model reads."""


class TemplateRefused(ValueError):
    """The model's chat template cannot take a conversation."""


def complete(model: BatchModel, prompt: str, sampling: SamplingOptions, *, place: int) -> Choice:
    """What the model writes after one prompt; `place` is its place in the request.

    Raises ValueError for a prompt that the model cannot take, as ContextTooShort where it is too long.
    """
    prompt_tokens = model.count_tokens(prompt)
    longest = int(getattr(model.model.config, "max_position_embeddings", 0) or _UNKNOWN_LENGTH)
    most = sampling.max_new_tokens or max(1, longest - prompt_tokens)
    if prompt_tokens + most > longest:
        raise ContextTooShort(
            f"the model reads {longest} tokens, and the prompt has {prompt_tokens}; {most} more were asked for"
        )
    wanted = sampling.logprobs
    found = model.complete(
        prompt,
        max_new_tokens=most,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed + place,
        stop=sampling.stop,
        logprobs=max(1, wanted) if wanted >= 0 else 0,
        json_schema=sampling.json_schema,
    )
    likelihoods = tuple((token, chance, likeliest[:wanted]) for token, chance, likeliest in found.logprobs)
    return Choice(
        text=found.text,
        finish_reason=found.finish_reason,
        prompt_tokens=found.prompt_tokens,
        completion_tokens=found.completion_tokens,
        logprobs=likelihoods if wanted >= 0 else None,
    )


def _prompts(model: BatchModel, request: BatchRequest) -> tuple[str, ...]:
    if request.endpoint is not Endpoint.CHAT:
        return request.texts
    messages = [{"role": message.role, "content": message.content} for message in request.messages]
    try:
        return (model.chat_prompt(messages),)
    except Exception as error:  # a template is a program of the model's, and raises what it likes
        raise TemplateRefused(f"the model's chat template refuses the messages: {error}") from error


def _as_api_error(error: ValueError, request: BatchRequest) -> ApiError:
    param = _PARAMS[request.endpoint]
    code = "context_length_exceeded" if isinstance(error, ContextTooShort) else None
    text = str(error).replace("prompt 0 ", "the prompt ", 1)
    return ApiError(f"line {request.line}: {text}", param=param, code=code)
