"""Test which library computes next, and shadow validation in the three hand-calculated cases of SLINFER §VI-C."""

from __future__ import annotations

import math
import random

import pytest
from core.pilot_shell import EvenCost
from hypothesis import given
from hypothesis import strategies as st

from stoker.pilot.core.turns import (
    MAX_HEADROOM_S,
    STEP_TIME_MARGIN,
    EngineOutlook,
    OpenAnswer,
    TurnRequest,
    UnreadPrompt,
    choose_next_turns,
    refuse_if_late,
)
from stoker.protocol.calls import RefusalCase
from stoker.protocol.ids import DeviceId, LibraryId

ONE = (DeviceId("gpu:0"),)
TWO = (DeviceId("gpu:0"), DeviceId("gpu:1"))


def wants(library: int, due_at: float, *, since: float = 0.0, devices: tuple[DeviceId, ...] = ONE) -> TurnRequest:
    return TurnRequest(LibraryId(library), devices, due_at, since)


def test_engine_with_the_least_headroom_takes_the_turn() -> None:
    assert choose_next_turns([wants(1, 2.2), wants(2, 1.9), wants(3, 2.0)], ()) == [2]  # Figure 14
    assert choose_next_turns([wants(1, math.inf), wants(2, 7.0)], ()) == [2], "a token without an objective waits"


def test_libraries_on_different_devices_compute_in_parallel() -> None:
    other = (DeviceId("gpu:1"),)
    assert choose_next_turns([wants(1, 2.0), wants(2, 3.0, devices=other), wants(3, 1.0)], ()) == [3, 2]
    assert choose_next_turns([wants(1, 2.0), wants(2, 3.0, devices=other)], ONE) == [2]


def test_more_urgent_library_blocks_other_starts_on_its_device() -> None:
    assert choose_next_turns([wants(1, 1.0, devices=TWO), wants(2, 2.0, devices=(DeviceId("gpu:1"),))], ONE) == []
    assert choose_next_turns([wants(1, 1.0, devices=TWO), wants(2, 2.0)], ()) == [1]


@given(
    st.lists(
        st.tuples(st.sampled_from([-1000.0, 0.0, 0.5, 30.0, math.inf]), st.floats(0.01, 3.0), st.booleans()),
        min_size=2, max_size=6,
    )
)  # fmt: skip
def test_wait_is_bounded_by_patience_and_one_turn_of_each_library(libraries: list[tuple[float, float, bool]]) -> None:
    """Libraries as (`due_at`, seconds of an iteration, True if on both devices). A `due_at` long past means always
    late.
    """
    devices = {n: TWO if both else ONE for n, (_, _, both) in enumerate(libraries)}
    since, now, had = dict.fromkeys(devices, 0.0), 0.0, dict.fromkeys(devices, 0)
    longest = MAX_HEADROOM_S + sum(seconds for _, seconds, _ in libraries)
    for _ in range(300):
        asked = [wants(n, libraries[n][0], since=since[n], devices=devices[n]) for n in devices]
        [chosen] = choose_next_turns(asked, ())
        assert now - since[chosen] <= longest
        now += libraries[chosen][1]
        since[chosen] = now
        had[chosen] += 1
    assert all(now - at <= longest for at in since.values())
    if now > 2 * longest:
        assert min(had.values()) > 0


# ---- shadow validation

MINE, OTHER = LibraryId(1), LibraryId(2)


def idle(library: LibraryId = MINE, **more: object) -> EngineOutlook:
    return EngineOutlook(library, EvenCost(), **more)  # type: ignore[arg-type]


def writing(library: LibraryId = OTHER, *, due_in: float = 1.0, decode: float = 0.05, rows: int = 1) -> EngineOutlook:
    return EngineOutlook(library, EvenCost(decode), rows, 100.0, due_in, 0.25)


def prompt(tokens: int = 400, due_in: float = 1.0, tpot_s: float = 0.25) -> UnreadPrompt:
    return UnreadPrompt(tokens, due_in, tpot_s)


def judged(*engines: EngineOutlook, new: UnreadPrompt, free_in: float = 0.0) -> str:
    late = refuse_if_late(engines, MINE, new, now=0.0, free_at=free_in)
    return late.why if late is not None else ""


@pytest.mark.parametrize(("tokens", "free_in", "is_in_time"), [(900, 0.0, True), (910, 0.0, False), (900, 0.02, False)])
def test_request_is_accepted_only_with_a_tenth_of_time_to_spare(tokens: int, free_in: float, is_in_time: bool) -> None:
    why = judged(idle(), new=prompt(tokens), free_in=free_in)
    assert (why == "") == is_in_time
    assert is_in_time or "its first token would be" in why


def test_prompt_that_waits_longer_is_read_first() -> None:
    early = idle(prompts=(prompt(400, 0.5),))
    # the first token needs both reads and a decode step
    assert judged(early, new=prompt(400, 0.9)) == "its first token would be 35.0 ms late"
    assert judged(early, new=prompt(400, 0.95)) == ""


def test_request_that_would_make_a_waiting_prompt_late_is_refused() -> None:
    assert "first token of another request" in judged(idle(prompts=(prompt(400, 0.6),)), new=prompt(300, 0.5))


@pytest.mark.parametrize(("due_in", "is_in_time"), [(0.5, True), (0.48, False)])
def test_request_that_would_make_tokens_of_others_late_is_refused(due_in: float, is_in_time: bool) -> None:
    # the new prompt is read first: 0.4 s to read plus a step of 0.05 s, each with a margin of a tenth, take 0.495 s
    why = judged(idle(), writing(due_in=due_in), new=prompt(400, 0.46))
    assert (why == "") == is_in_time
    assert is_in_time or why.startswith("a token of another request would be")


def test_prompt_that_is_due_after_the_new_prompt_is_simulated() -> None:
    long = idle(prompts=(prompt(1000, 3.0),))
    assert "a token of another request" in judged(long, writing(due_in=1.2), new=prompt(100, 0.5))


@pytest.mark.parametrize(("decode", "is_in_time"), [(0.11, True), (0.12, False)])
def test_request_is_refused_if_steps_of_all_engines_exceed_its_tpot(decode: float, is_in_time: bool) -> None:
    mine = EngineOutlook(MINE, EvenCost(decode), 1, 100.0, 5.0, 0.25)
    why = judged(mine, writing(due_in=5.0, decode=decode), new=prompt(10, 5.0))
    assert (2 * decode * STEP_TIME_MARGIN <= 0.25) == is_in_time
    assert (why == "") == is_in_time
    assert is_in_time or why.startswith("one decode step of every engine would take 264 ms, and tpot is 250 ms")


def late(*, by_s: float, decode: float = 0.05) -> EngineOutlook:
    return EngineOutlook(OTHER, EvenCost(decode), 1, 100.0, math.inf, 0.25, late_at=-by_s)


def test_request_that_is_already_late_may_become_later() -> None:
    assert judged(idle(), late(by_s=0.1), new=prompt(400, 0.7)) == ""


def test_engine_goes_first_until_its_late_request_is_on_time() -> None:
    assert judged(idle(), late(by_s=0.1, decode=0.15), new=prompt(700, 0.9)).startswith("its first token would be")
    assert judged(idle(), writing(decode=0.15, due_in=5.0), new=prompt(700, 0.9)) == ""


def test_engine_reads_no_prompt_until_its_cache_is_resized() -> None:
    assert judged(idle(ready_at=0.5), new=prompt(400, 1.0)) == ""
    assert judged(idle(ready_at=0.6), new=prompt(400, 1.0)).startswith("its first token would be")


def test_request_without_an_objective_delays_no_other_request() -> None:
    assert judged(idle(), new=UnreadPrompt(50_000)) == ""


def test_request_without_objective_has_its_turn_within_eight_seconds() -> None:
    busy = writing(due_in=2.0, decode=0.17)
    assert judged(idle(), busy, new=UnreadPrompt(3_000)) == ""
    assert judged(idle(), busy, new=UnreadPrompt(50_000)).startswith("a token of another request would be")


# ---- answers that end


def answering(*left: int, lead_s: float = 0.1, decode: float = 0.15, counts: int = 0) -> EngineOutlook:
    """An engine whose answers write up to `left` more tokens. The next tokens are due in `lead_s`, then every 0.25 s.
    `counts`: number of further requests without a known maximum length.
    """
    answers = tuple(OpenAnswer(lead_s, 0.25, each) for each in left)
    return EngineOutlook(OTHER, EvenCost(decode), len(left) + counts, 100.0, lead_s, 0.25, answers=answers)


def ending(most: int, *, due_in: float = 1.0) -> UnreadPrompt:
    return UnreadPrompt(100, due_in, 0.25, most)


def case_of(*engines: EngineOutlook, new: UnreadPrompt) -> RefusalCase | None:
    late = refuse_if_late(engines, MINE, new, now=0.0, free_at=0.0)
    return late.case if late is not None else None


LEAD_S, STEP_S = 2.0, 0.15 * STEP_TIME_MARGIN
"""Two engines each write a token in 0.33 s, so an answer that is 2 s early loses 0.08 s per token."""


@pytest.mark.parametrize(("left", "is_in_time"), [(20, True), (30, False)])
def test_request_is_accepted_if_short_answers_end_before_being_late(left: int, is_in_time: bool) -> None:
    mine = EngineOutlook(MINE, EvenCost(0.15))
    found = case_of(mine, answering(left, lead_s=LEAD_S), new=ending(left, due_in=LEAD_S))
    assert found is (None if is_in_time else RefusalCase.DECODE_ROUND)


@pytest.mark.parametrize("unknown", ["new", "waiting", "writing", "very long"])
def test_answers_of_unknown_length_are_judged_by_decode_rounds(unknown: str) -> None:
    prompts = (UnreadPrompt(10, LEAD_S, 0.25, 0 if unknown == "waiting" else 9),)
    mine = EngineOutlook(MINE, EvenCost(0.15), prompts=prompts)
    most = {"new": 0, "very long": 100_000}.get(unknown, 9)
    long = unknown == "very long"
    other = answering(most if long else 9, lead_s=1e4 if long else LEAD_S, counts=unknown == "writing")
    assert case_of(mine, other, new=ending(most, due_in=1e4)) is RefusalCase.DECODE_ROUND
    known = EngineOutlook(MINE, EvenCost(0.15), prompts=(UnreadPrompt(10, LEAD_S, 0.25, 9),))
    assert case_of(known, answering(9, lead_s=LEAD_S), new=ending(9, due_in=100.0)) is None


def test_answer_that_is_already_late_refuses_no_other_request() -> None:
    mine = EngineOutlook(MINE, EvenCost(0.15), 1, 100.0, 8.0, 0.25, answers=(OpenAnswer(8.0, 0.25, 12),))
    late = EngineOutlook(
        OTHER, EvenCost(0.15), 1, 100.0, math.inf, 0.25, late_at=-9.0, answers=(OpenAnswer(-9.0, 0.25, 12),)
    )
    assert case_of(mine, late, new=ending(12, due_in=8.0)) is None
    assert case_of(mine, answering(12, lead_s=0.16), new=ending(12, due_in=8.0)) is RefusalCase.OTHERS


@pytest.mark.parametrize("seed", range(20))
def test_accepted_request_makes_no_request_late_in_simulated_turns(seed: int) -> None:
    """Simulate the turns one by one in the order of the pilot, and compare the result with the validation."""
    chance = random.Random(f"to the end/{seed}")
    accepted = refused = 0
    for _ in range(60):
        lengths = [[chance.randint(1, 60) for _ in range(chance.randint(0, 4))] for _ in range(2)]
        leads = [[chance.uniform(0.3, 4.0) for _ in each] for each in lengths]
        new, mine_s, theirs_s = ending(chance.randint(2, 60)), chance.uniform(0.05, 0.2), chance.uniform(0.05, 0.2)
        engines = [
            EngineOutlook(
                library, EvenCost(step_s), len(left), 100.0, min(ahead, default=math.inf), 0.25 if left else 0.0,
                answers=tuple(OpenAnswer(at, 0.25, count) for at, count in zip(ahead, left, strict=True)),
            )
            for library, step_s, left, ahead in zip((MINE, OTHER), (mine_s, theirs_s), lengths, leads, strict=True)
        ]  # fmt: skip
        is_late = late_if_played(engines, new)
        if refuse_if_late(engines, MINE, new, now=0.0, free_at=0.0) is None:
            accepted += 1
            assert not is_late
        else:
            refused += 1
    assert accepted
    assert refused


def late_if_played(engines: list[EngineOutlook], new: UnreadPrompt) -> bool:
    """Simulate steps a tenth longer than measured, in order of due times; return True if a token is late."""
    left = {each.library: [list(answer) for answer in each.answers] for each in engines}
    unread = [new]
    at, since = 0.0, dict.fromkeys(left, 0.0)
    while unread or any(left.values()):
        dues = {
            library: min([*(due for due, _, _ in answers), *(each.due_at for each in unread if library == MINE)])
            for library, answers in left.items()
            if answers or (unread and library == MINE)
        }
        library = min(dues, key=lambda each: (max(since[each], dues[each]), since[each]))
        engine = next(each for each in engines if each.library == library)
        if library == MINE and unread:
            at += STEP_TIME_MARGIN * engine.cost.prefill_s(new.tokens, new.tokens / 2)
            if at > new.due_at:
                return True
            left[MINE].append([new.due_at + 0.25, 0.25, new.most - 1])
            unread.clear()
        else:
            at += STEP_TIME_MARGIN * engine.cost.decode_s(len(left[library]), 100.0)[0]
            for answer in left[library]:
                if at > answer[0] + 1e-9:
                    return True
                answer[0] += 0.25
                answer[2] -= 1
        left[library] = [answer for answer in left[library] if answer[2] > 0]
        since[library] = at
    return False
