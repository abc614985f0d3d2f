"""Figures about the open work of an engine, for admission decisions of other libraries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any, NamedTuple


class EngineWork(NamedTuple):
    """Figures about an engine's open requests.

    `rows`, `length`, `tpot_s`: number, mean length and minimum time per output token of decoding requests. `due_at`,
    `late_at`: earliest due time in the future, and in the past. `prompts`: unread prompts (tokens, due time, time per
    output token, maximum output tokens), earliest first. `answers`: the same without tokens for the rest of each
    decoding request; empty if no request has a time per output token.
    """

    rows: int = 0
    length: float = 0.0
    due_at: float = inf
    tpot_s: float = 0.0
    late_at: float = inf
    prompts: Sequence[tuple[int, float, float, int]] = ()
    accepted_requests: int = 0
    peak_tokens: int = 0
    answers: Sequence[tuple[float, float, int]] = ()


def work_of(requests: Iterable[Any], *, now: float, accepted_requests: int, mean_output: float) -> EngineWork:
    """Return the figures of open `engine_thread.Generation`s. `now` is on time.monotonic."""
    rows, total, due_at, tpot_s, late_at, peak = 0, 0, inf, 0.0, inf, 0.0
    prompts: list[tuple[int, float, float, int]] = []
    answers: list[tuple[float, float, int]] = []
    for request in requests:
        made, prompt, each_s = request.made, request.prompt_tokens, request.tpot_s
        peak += prompt + (made if made > mean_output else mean_output)
        if not made:
            prompts.append((prompt, request.first_due_at, each_s, request.most))
            continue
        rows += 1
        total += prompt + made
        at = request.first_due_at + made * each_s
        left = request.most - made
        answers.append((at, each_s, left if left > 0 else 0))
        if each_s:
            if at < now:
                if at < late_at:
                    late_at = at
            elif at < due_at:
                due_at = at
            if each_s < tpot_s or not tpot_s:
                tpot_s = each_s
    if len(prompts) > 1:
        prompts.sort(key=lambda prompt: prompt[1])
    length = total / rows if rows else 0.0
    return EngineWork(
        rows, length, due_at, tpot_s, late_at, prompts, accepted_requests, int(peak), answers if tpot_s else ()
    )
