"""Shadow validation: the three cases of SLINFER §VI-C, calculated by hand."""

from __future__ import annotations

import math

import pytest
from core.even_cost import EvenCost

from stoker.pilot.core.turns import OVERESTIMATE, EngineOutlook, UnreadPrompt, why_late
from stoker.protocol.ids import LibraryId

ONE, TWO = LibraryId(1), LibraryId(2)


def idle(library: LibraryId = ONE, **more: object) -> EngineOutlook:
    return EngineOutlook(library, EvenCost(), **more)  # type: ignore[arg-type]


def writing(library: LibraryId = TWO, *, due_in: float = 1.0, decode: float = 0.05, rows: int = 1) -> EngineOutlook:
    return EngineOutlook(library, EvenCost(decode), rows, 100.0, due_in, 0.25)


def prompt(tokens: int = 400, due_in: float = 1.0, tpot_s: float = 0.25) -> UnreadPrompt:
    return UnreadPrompt(tokens, due_in, tpot_s)


def judged(*engines: EngineOutlook, new: UnreadPrompt, free_in: float = 0.0) -> str:
    late = why_late(engines, ONE, new, now=0.0, free_at=free_in)
    return late.why if late is not None else ""


def test_a_request_joins_where_it_is_in_time() -> None:
    assert judged(idle(), new=prompt()) == ""
    assert judged(idle(), writing(), new=prompt()) == ""


@pytest.mark.parametrize(("tokens", "free_in", "is_in_time"), [(900, 0.0, True), (910, 0.0, False), (900, 0.02, False)])
def test_its_own_prompt_is_read_in_time_with_a_tenth_to_spare(tokens: int, free_in: float, is_in_time: bool) -> None:
    why = judged(idle(), new=prompt(tokens), free_in=free_in)
    assert (why == "") == is_in_time
    assert is_in_time or "its first token would come" in why


def test_a_prompt_that_waits_longer_is_read_first() -> None:
    early = idle(prompts=(prompt(400, 0.5),))
    # the first token needs both reads, and a step that writes
    assert judged(early, new=prompt(400, 0.9)) == "its first token would come 35.0 ms late"
    assert judged(early, new=prompt(400, 0.95)) == ""


def test_no_prompt_that_waits_is_made_late() -> None:
    assert "first token of another request" in judged(idle(prompts=(prompt(400, 0.6),)), new=prompt(300, 0.5))


@pytest.mark.parametrize(("due_in", "is_in_time"), [(0.5, True), (0.48, False)])
def test_no_token_of_another_request_is_made_late(due_in: float, is_in_time: bool) -> None:
    # the prompt is due first. It takes 0.4 s to read, then a step takes 0.05 s, and each counts a tenth more: 0.495 s
    why = judged(idle(), writing(due_in=due_in), new=prompt(400, 0.46))
    assert (why == "") == is_in_time
    assert is_in_time or why.startswith("a token of another request would come")


def test_a_prompt_behind_the_new_one_is_played_too() -> None:
    long = idle(prompts=(prompt(1000, 3.0),))
    assert "a token of another request" in judged(long, writing(due_in=1.2), new=prompt(100, 0.5))


@pytest.mark.parametrize(("decode", "is_in_time"), [(0.11, True), (0.12, False)])
def test_a_step_of_each_engine_fits_into_a_time_per_token(decode: float, is_in_time: bool) -> None:
    mine = EngineOutlook(ONE, EvenCost(decode), 1, 100.0, 5.0, 0.25)
    why = judged(mine, writing(due_in=5.0, decode=decode), new=prompt(10, 5.0))
    assert (2 * decode * OVERESTIMATE <= 0.25) == is_in_time
    assert (why == "") == is_in_time
    assert is_in_time or why.startswith("a round of decodes on its device would take 264 ms, and tpot is 250 ms")


def late(*, by_s: float, decode: float = 0.05) -> EngineOutlook:
    return EngineOutlook(TWO, EvenCost(decode), 1, 100.0, math.inf, 0.25, late_at=-by_s)


def test_a_request_that_is_late_already_may_get_later() -> None:
    assert judged(idle(), late(by_s=0.1), new=prompt(400, 0.7)) == ""


def test_engine_with_a_late_request_goes_first_until_it_is_punctual() -> None:
    assert judged(idle(), late(by_s=0.1, decode=0.15), new=prompt(700, 0.9)).startswith("its first token would come")
    assert judged(idle(), writing(decode=0.15, due_in=5.0), new=prompt(700, 0.9)) == ""


def test_an_engine_whose_cache_is_resized_reads_nothing_before() -> None:
    assert judged(idle(ready_at=0.5), new=prompt(400, 1.0)) == ""
    assert judged(idle(ready_at=0.6), new=prompt(400, 1.0)).startswith("its first token would come")


def test_nobody_waits_for_a_request_without_an_objective() -> None:
    assert judged(idle(), new=UnreadPrompt(50_000)) == ""


def test_request_without_objective_has_its_turn_within_eight_seconds() -> None:
    busy = writing(due_in=2.0, decode=0.17)
    assert judged(idle(), busy, new=UnreadPrompt(3_000)) == ""
    assert judged(idle(), busy, new=UnreadPrompt(50_000)).startswith("a token of another request would come")
