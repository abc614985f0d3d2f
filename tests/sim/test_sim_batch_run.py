"""A batch in virtual time: known answers, and the same steps as the engine's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.contexts.batching import BatchLimits, Step
from stoker.contexts.step_times import StepSample, StepTimes, times_of
from stoker.manager.sim.batch_run import RequestEnd, TimedRequest, batch_run

LIMITS = BatchLimits(rows=4, prefill_tokens=64)


def linear() -> StepTimes:
    """A token that is read takes 1 ms; a step that writes takes 10 ms and 1 ms a request."""
    prefill = [StepSample(True, 2**power, 2**power / 2, 0.001 * 2**power) for power in range(8)]
    decode = [StepSample(False, rows, length, 0.01 + 0.001 * rows) for rows in (1, 2, 4, 8) for length in (8, 512)]
    return times_of([*prefill, *decode])


def test_one_request_reads_and_then_writes() -> None:
    [end] = batch_run(linear(), LIMITS, [TimedRequest(1.0, prompt=32, tokens=11)])
    assert end == RequestEnd(pytest.approx(1.032), pytest.approx(1.032 + 10 * 0.011))


def test_a_long_prompt_is_read_in_parts_between_which_others_write() -> None:
    steps: list[bool] = []
    first, second = batch_run(
        linear(), LIMITS, [TimedRequest(0.0, 16, 9), TimedRequest(0.016, 128, 1)],
        took=lambda step, _: steps.append(step.prefill),
    )  # fmt: skip
    assert steps[:5] == [True, False, True, False, True]
    assert second.ended_at == second.first_at == pytest.approx(0.016 + 2 * (0.011 + 0.064))
    assert first.ended_at > second.ended_at


def test_a_request_waits_for_a_free_row() -> None:
    ends = batch_run(linear(), BatchLimits(rows=1), [TimedRequest(0.0, 8, 5), TimedRequest(0.0, 8, 1)])
    assert ends[1].first_at == pytest.approx(ends[0].ended_at + 0.008)


def test_a_margin_makes_every_step_longer() -> None:
    requests = [TimedRequest(0.0, 20, 7), TimedRequest(0.0, 30, 3)]
    plain, wide = (batch_run(linear(), LIMITS, requests, margin=margin) for margin in (0.0, 0.1))
    assert [end.ended_at * 1.1 for end in plain] == pytest.approx([end.ended_at for end in wide])


def test_what_can_never_run_is_refused() -> None:
    with pytest.raises(ValueError, match="key-value cache"):
        batch_run(linear(), BatchLimits(cache_tokens=64), [TimedRequest(0.0, 100, 100)])
    with pytest.raises(LookupError):
        batch_run(StepTimes(), LIMITS, [TimedRequest(0.0, 1, 1)])


@given(
    st.lists(
        st.builds(TimedRequest, st.floats(0, 1), st.integers(1, 200), st.integers(1, 40)), min_size=1, max_size=20
    ),
    st.sampled_from([0, 512, 1024]),
)
def test_every_request_ends_after_it_came_and_each_token_is_read_once(
    requests: list[TimedRequest], cache_tokens: int
) -> None:
    steps: list[Step] = []
    limits = BatchLimits(rows=4, prefill_tokens=64, cache_tokens=cache_tokens)
    ends = batch_run(linear(), limits, requests, took=lambda step, _: steps.append(step))
    for request, end in zip(requests, ends, strict=True):
        assert request.at < end.first_at <= end.ended_at
    decoded = sum(len(step.requests) for step in steps if not step.prefill)
    assert decoded <= sum(request.tokens for request in requests)  # the last token of a prompt may be read in one
    if not cache_tokens:  # none is read twice
        read = sum(sum(step.tokens) for step in steps)
        assert read == sum(request.prompt + request.tokens - 1 for request in requests)
