"""The engine in virtual time runs the steps that the batching rules prescribe."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.engines import step_times

from stoker.contexts.batching import BatchLimits, Step
from stoker.contexts.step_times import StepSample, StepSeconds, StepTimes, group_samples
from stoker.manager.sim.batch_run import TimedRequest, batch_run
from stoker.manager.sim.log import TokenTimes
from stoker.manager.sim.virtual_engine import VirtualEngine

TIMES = step_times()
REQUESTS = st.lists(
    st.builds(
        TimedRequest,
        at=st.integers(0, 4000).map(lambda ms: ms / 1024),
        prompt=st.integers(1, 300),
        tokens=st.integers(1, 60),
        due_at=st.sampled_from([float("inf"), 1.0, 2.0]),
        tpot_s=st.sampled_from([0.0, 0.25]),
    ),
    min_size=1,
    max_size=20,
)
LIMITS = st.builds(
    BatchLimits, rows=st.sampled_from([1, 3, 32]), prefill_tokens=st.sampled_from([64, 4096]),
    cache_tokens=st.sampled_from([0, 512, 1024]),
)  # fmt: skip


class Served:
    def __init__(self, limits: BatchLimits, requests: Sequence[TimedRequest], *, leap: bool) -> None:
        self.engine = VirtualEngine(StepSeconds(TIMES), limits)
        self.times = [TokenTimes(one.at, one.prompt, one.tokens, one.due_at, one.tpot_s) for one in requests]
        self.begins = 0
        coming = sorted(range(len(requests)), key=lambda number: (-requests[number].at, -number))
        now, left = 0.0, len(requests)
        while left:
            while coming and requests[coming[-1]].at <= now:
                self.engine.add_request(coming[-1], self.times[coming.pop()], now=now)
            if not self.engine._computing_ends and not self.engine.begin_steps(now, whole_burst=leap):
                now = requests[coming[-1]].at
                continue
            self.begins += 1
            comes_at = requests[coming[-1]].at if coming else float("inf")
            now = min(self.engine.ends_at, comes_at)
            if now == self.engine.ends_at:
                left -= len(self.engine.end_steps(now))


@given(REQUESTS, LIMITS, st.booleans())
def test_burst_equals_the_steps_that_it_replaces(requests: list[TimedRequest], limits: BatchLimits, leap: bool) -> None:
    served = Served(limits, requests, leap=leap)
    expected = batch_run(TIMES, limits, requests)
    assert [times.first_at for times in served.times] == pytest.approx([end.first_at for end in expected])
    assert [times.last_at for times in served.times] == pytest.approx([end.ended_at for end in expected])
    assert all(times.seen == times.output for times in served.times)
    assert len(served.engine) == 0


def test_many_equal_steps_are_simulated_as_a_few_bursts() -> None:
    served = Served(BatchLimits(), [TimedRequest(0.0, 10, 1000)], leap=True)
    assert served.engine.counts.steps == 1000
    # The engine starts once for the prompt and once for each burst. A burst ends when the memory reservation must grow.
    assert served.begins < 20


def test_interrupted_burst_continues_at_its_last_step() -> None:
    ends = []
    for cuts in ((), (0.1, 0.25)):
        engine, times = VirtualEngine(StepSeconds(TIMES), BatchLimits()), TokenTimes(0.0, 10, 40)
        engine.add_request(1, times, now=0.0)
        engine.begin_steps(0.0)
        now = engine.ends_at
        engine.end_steps(now)
        for cut in cuts:
            engine.begin_steps(now, whole_burst=True)
            assert engine.end_burst_early(cut)
            now = engine.ends_at
            assert cut <= now < cut + 0.0111  # the burst ends with the running step
            assert engine.end_steps(now) == []
        engine.begin_steps(now, whole_burst=True)
        ends.append(engine.ends_at)
        assert engine.end_steps(engine.ends_at) == [1]
        assert (times.seen, times.last_at) == (40, ends[-1])
    assert ends[0] == pytest.approx(ends[1])


def test_engine_reports_the_due_time_of_its_most_urgent_token() -> None:
    engine = VirtualEngine(StepSeconds(TIMES), BatchLimits())
    engine.add_request(1, TokenTimes(0.0, 10, 40, due_at=2.0, tpot_s=0.25), now=0.0)
    assert engine.due_at == 2.0
    engine.begin_steps(0.0)
    engine.end_steps(engine.ends_at)
    for made in range(1, 5):
        assert engine.due_at == 2.0 + 0.25 * made
        engine.begin_steps(1.0)
        engine.end_steps(1.1)
    engine.add_request(2, TokenTimes(1.0, 10, 40, due_at=1.5), now=1.0)
    assert engine.due_at == 1.5


def test_request_that_leaves_during_a_burst_writes_no_token() -> None:
    engine = VirtualEngine(StepSeconds(TIMES), BatchLimits())
    times = [TokenTimes(0.0, 10, 40) for _ in range(2)]
    for number, one in enumerate(times):
        engine.add_request(number, one, now=0.0)
    engine.begin_steps(0.0)
    engine.end_steps(engine.ends_at)
    engine.begin_steps(1.0, whole_burst=True)
    engine.remove_request(0, now=1.02)
    ends_at = engine.ends_at
    assert ends_at < 1.05  # the burst ends with the current step
    engine.end_steps(ends_at)
    # both requests got a token in the first step of the burst; the second request got another token in the next step
    assert [one.seen for one in times] == [2, 3]
    engine.remove_request(1, now=ends_at)
    assert len(engine) == 0
    assert not engine.begin_steps(ends_at)


def test_only_the_first_token_is_due_without_a_time_per_token() -> None:
    times = TokenTimes(0.0, 10, 3, due_at=1.0)
    times.record_tokens([0.5, 7.0], made=0)
    times.record_tokens([9.0], made=2)
    assert times.late_s == -0.5
    assert times.is_met


def test_tokens_already_sent_to_a_program_are_not_counted_again() -> None:
    times = TokenTimes(0.0, 10, 5, due_at=1.0, tpot_s=0.25)
    times.record_tokens([0.5, 0.75], made=0)
    times.record_tokens([8.0, 8.25], made=0)  # the repeated run generates tokens that the program already has
    assert (times.seen, times.last_at, times.late_s) == (2, 0.75, -0.5)
    times.record_tokens([8.5], made=2)
    assert (times.seen, times.worst_gap_s, times.late_s) == (3, 7.75, 7.0)
    times.record_tokens([8.6, 8.7], made=3)
    assert times.seen == 5
    assert not times.is_met
    assert times.mean_tpot_s == pytest.approx((8.7 - 0.5) / 4)


SMALL_LIMITS = BatchLimits(rows=4, prefill_tokens=64)


def linear() -> StepTimes:
    """Step times: 1 ms to read a token; a decode step takes 10 ms plus 1 ms per request."""
    prefill = [StepSample(True, 2**power, 2**power / 2, 0.001 * 2**power) for power in range(8)]
    decode = [StepSample(False, rows, length, 0.01 + 0.001 * rows) for rows in (1, 2, 4, 8) for length in (8, 512)]
    return group_samples([*prefill, *decode])


def test_request_that_can_never_run_is_refused() -> None:
    with pytest.raises(ValueError, match="key-value cache"):
        batch_run(linear(), BatchLimits(cache_tokens=64), [TimedRequest(0.0, 100, 100)])
    with pytest.raises(LookupError):
        batch_run(StepTimes(), SMALL_LIMITS, [TimedRequest(0.0, 1, 1)])


@given(
    st.lists(
        st.builds(TimedRequest, st.floats(0, 1), st.integers(1, 200), st.integers(1, 40)), min_size=1, max_size=20
    ),
    st.sampled_from([0, 512, 1024]),
)
def test_every_request_ends_and_each_token_is_read_once(requests: list[TimedRequest], cache_tokens: int) -> None:
    steps: list[Step] = []
    limits = BatchLimits(rows=4, prefill_tokens=64, cache_tokens=cache_tokens)
    ends = batch_run(linear(), limits, requests, on_step=lambda step, _: steps.append(step))
    for request, end in zip(requests, ends, strict=True):
        assert request.at < end.first_at <= end.ended_at
    decoded = sum(len(step.requests) for step in steps if not step.prefill)
    assert decoded <= sum(request.tokens for request in requests)  # one step may read the last token of a prompt
    if not cache_tokens:  # no token is read twice
        read = sum(sum(step.tokens) for step in steps)
        assert read == sum(request.prompt + request.tokens - 1 for request in requests)
