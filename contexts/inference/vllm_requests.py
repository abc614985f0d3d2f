"""Convert requests and log-likelihoods to and from vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from stoker.contexts.inference.adapter import PromptToken, Sampling, TokenChance
from stoker.contexts.inference.kernels import combine_seed_pair
from stoker.contexts.inference.options import STRUCTURES

_OWN_OPTIONS = ("ignore_eos", "stop_token_ids")


def vllm_sampling_params(sampling: Sampling, *, ends: frozenset[int]) -> SamplingParams:
    """Return the vLLM options of a request. vLLM always writes at least one token."""
    form, value = sampling.structure or ("", None)
    held = StructuredOutputsParams(**{"json" if form == "json_schema" else form: value}) if form else None
    others = {name: value for name, value in sampling.engine_options if name not in (*_OWN_OPTIONS, *STRUCTURES)}
    return SamplingParams(
        temperature=sampling.temperature, top_p=sampling.top_p, max_tokens=max(1, sampling.max_new_tokens),
        seed=combine_seed_pair(sampling.seed) if sampling.temperature else None, logprobs=sampling.logprobs or None,
        stop_token_ids=sorted(sampling.ends(ends)), ignore_eos=True, detokenize=False, structured_outputs=held,
        prompt_logprobs=sampling.prompt_logprobs or None, output_kind=RequestOutputKind.DELTA, **others,
    )  # fmt: skip


def chances_of(token: int, told: dict[int, Any], *, most: int) -> tuple[float, tuple[TokenChance, ...]]:
    """Return the log-likelihoods of a token and of the likeliest tokens. `told`: vLLM's by token."""
    ordered = sorted(told.items(), key=lambda chance: -chance[1].logprob)
    likeliest = tuple(TokenChance(id, chance.logprob) for id, chance in ordered[:most])
    return float(told[token].logprob), likeliest


def prompt_with_logprobs(
    prompt: Sequence[int], told: Sequence[dict[int, Any] | None], *, most: int
) -> tuple[PromptToken, ...]:
    """Return a prompt's tokens with their log-likelihoods. `told`: vLLM's by position (None for the first)."""
    return tuple(
        PromptToken(token, *chances_of(token, chances, most=most)) if chances else PromptToken(token)
        for token, chances in zip(prompt, told, strict=True)
    )
