from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.contexts.batching import BatchLimits, RunningBatch, Step, rounded_row_tokens


def run(batch: RunningBatch, ends: dict[int, int], *, steps: int = 10_000) -> list[Step]:
    done: list[Step] = []
    while (step := batch.next_step()) is not None:
        assert len(done) < steps, "the batch does not end"
        ended = []
        for id, count in zip(step.requests, step.tokens, strict=True):
            request = batch.running[id]
            assert 1 <= count <= request.unread_tokens
            assert request.read + count <= request.reserved_tokens
            if request.unread_tokens == count and request.made + 1 == ends[id]:
                ended.append(id)
        batch.record_step(step, ended=ended)
        done.append(step)
    return done


def did_next(batch: RunningBatch) -> None:
    step = batch.next_step()
    assert step is not None
    batch.record_step(step)


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 300)), min_size=1, max_size=8),
    st.sampled_from([1, 3, 32]),
    st.sampled_from([0, 512, 1024]),
)
def test_repeated_step_equals_the_same_number_of_single_steps(requests, rows, cache_tokens):
    """Compare two equal batches: the results of a repeated step arrive one by one, or all together."""
    batches = [RunningBatch(BatchLimits(rows=rows, prefill_tokens=64, cache_tokens=cache_tokens)) for _ in range(2)]
    for id, (prompt, most) in enumerate(requests):
        if not batches[0].find_refusal_reason(prompt=prompt, most=most):
            for batch in batches:
                batch.add(id, prompt=prompt, most=most, due_at=float(id), tpot_s=0.25)
    single, many = batches
    while (step := many.next_step()) is not None:
        times = many.count_repeats(step)
        if not step.prefill:
            times = min(times, *(many.running[id].most - many.running[id].made for id in step.requests), 1000)
        for number in range(times):
            starts = tuple(start + number for start in step.starts)
            again = step if number == 0 else msgspec.structs.replace(step, starts=starts, evicted=())
            assert single.next_step() == again
            ended = [id for id in step.requests if _ends(single, step, id)]
            single.record_step(step, ended=ended)
        many.record_step(step, ended=ended, times=times)
        assert many.requests() == single.requests()
        assert many.mean_output == single.mean_output
    assert single.next_step() is None


def _ends(batch: RunningBatch, step: Step, id: int) -> bool:
    request = batch.running[id]
    count = step.tokens[step.requests.index(id)]
    return request.unread_tokens == count and request.made + 1 == request.most


def test_each_token_is_due_one_tpot_after_the_previous_token() -> None:
    batch = RunningBatch(BatchLimits())
    batch.add(1, prompt=4, most=9, due_at=2.0, tpot_s=0.25)
    for made in range(3):
        assert batch.due_at == 2.0 + 0.25 * made
        did_next(batch)
    batch = RunningBatch(BatchLimits())
    batch.add(1, prompt=10, most=5, due_at=3.0)
    did_next(batch)
    assert batch.due_at == math.inf, "without a time per token, only the first token is due"


def test_prompts_are_read_together_and_finished_requests_leave() -> None:
    batch = RunningBatch(BatchLimits(rows=8, prefill_tokens=100))
    batch.add(1, prompt=10, most=5)
    batch.add(2, prompt=20, most=5)
    steps = run(batch, {1: 1, 2: 3})
    assert steps == [
        Step(prefill=True, requests=(1, 2), tokens=(10, 20), starts=(0, 0)),
        Step(prefill=False, requests=(2,), tokens=(1,), starts=(20,), writing=1),
        Step(prefill=False, requests=(2,), tokens=(1,), starts=(21,), writing=1),
    ]
    assert batch.mean_output == 2


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"rows": 2}, [(1, 2), (1, 2), (3,), (2, 3)]),
        ({"rows": 4}, [(1, 2, 3), (1, 2, 3), (2,)]),
        ({"rows": 4, "prefill_requests": 1}, [(1,), (1,), (2,), (2,), (3,), (2, 3)]),  # one prompt is read at a time
    ],
)
def test_free_row_is_reused_before_other_requests_end(limits: dict[str, int], expected: list[tuple[int, ...]]) -> None:
    batch = RunningBatch(BatchLimits(prefill_tokens=100, **limits))
    for id in (1, 2, 3):
        batch.add(id, prompt=4, most=9)
    steps = run(batch, {1: 2, 2: 6, 3: 2})
    assert [step.requests for step in steps[: len(expected)]] == expected


@pytest.mark.parametrize("mixes", [False, True])
def test_long_prompt_is_read_in_parts_between_or_in_decode_steps(mixes: bool) -> None:
    batch = RunningBatch(BatchLimits(rows=4, prefill_tokens=16, mixes=mixes))
    batch.add(1, prompt=4, most=9)
    did_next(batch)
    batch.add(2, prompt=40, most=9)
    found = [(step.prefill, step.requests, step.tokens) for step in run(batch, {1: 9, 2: 1})]
    one, parts = (False, (1,), (1,)), (16, 16, 8)
    if mixes:
        assert found[:4] == [*((True, (2, 1), (part, 1)) for part in parts), one]
    else:
        assert found[:6] == [each for part in parts for each in (one, (True, (2,), (part,)))]


def test_prompt_with_the_nearest_deadline_is_read_first() -> None:
    batch = RunningBatch(BatchLimits(rows=1, prefill_tokens=100))
    batch.add(1, prompt=4, most=2)
    batch.add(2, prompt=4, most=2, due_at=9.0, tpot_s=0.25)
    batch.add(3, prompt=4, most=2, due_at=5.0)
    assert batch.due_at == 5.0
    order = [step.requests[0] for step in run(batch, {1: 1, 2: 1, 3: 1})]
    assert order == [3, 2, 1]


def test_requests_wait_for_memory_and_the_oldest_is_never_evicted() -> None:
    batch = RunningBatch(BatchLimits(rows=8, prefill_tokens=1000, cache_tokens=192))
    for id in (1, 2, 3, 4):
        batch.add(id, prompt=50, most=60)
    step = batch.next_step()
    assert step is not None
    assert step.requests == (1, 2, 3)
    steps = run(batch, {1: 60, 2: 60, 3: 5, 4: 60})
    assert any(step.evicted for step in steps)
    assert not any(1 in step.evicted for step in steps)  # the oldest request 1 has the least headroom


def test_expected_cache_size_grows_if_output_exceeds_the_mean() -> None:
    batch = RunningBatch(BatchLimits(rows=8, prefill_tokens=1000, cache_tokens=1024, page_tokens=16))
    batch.add(1, prompt=16, most=32)
    run(batch, {1: 32})
    batch.add(2, prompt=16, most=200)
    assert batch.expected_cache_tokens() == 16 + 32  # 32 is the mean output of ended requests
    step = batch.next_step()
    assert step is not None
    batch.record_step(step)
    assert batch.expected_cache_tokens(unrecorded=31) == 16 + 32
    assert batch.expected_cache_tokens(unrecorded=32) == 16 + 112  # 33 tokens are written, and 64 more may come
    assert batch.expected_cache_tokens(unrecorded=190) == 16 + 208  # at most its limit of 200 tokens, rounded up


def test_request_that_can_never_fit_is_refused() -> None:
    batch = RunningBatch(BatchLimits(cache_tokens=256))
    assert batch.find_refusal_reason(prompt=200, most=56) == ""
    assert "need 512 tokens" in batch.find_refusal_reason(prompt=200, most=57)
    assert RunningBatch(BatchLimits()).find_refusal_reason(prompt=10**6, most=10**6) == ""
    batch.add(1, prompt=200, most=56)
    with pytest.raises(ValueError, match="200 prompt tokens and 57 new tokens need 512 tokens"):
        batch.add(2, prompt=200, most=57)
    assert [request.id for request in batch.requests()] == [1], "a request that would wait forever is refused"


requests = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 80), st.integers(1, 80), st.sampled_from([math.inf, 1.0, 2.0])),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    asked=requests, rows=st.integers(1, 6), part=st.integers(1, 200), room=st.sampled_from([0, 512, 1024]),
    aborted=st.sets(st.integers(0, 11), max_size=3), mixes=st.booleans(),
)  # fmt: skip
def test_every_request_ends_within_the_row_and_memory_limits(asked, rows, part, room, aborted, mixes):
    batch = RunningBatch(BatchLimits(rows=rows, prefill_tokens=part, cache_tokens=room, mixes=mixes))
    ends = {}
    for id, (prompt, most, made, due_at) in enumerate(asked):
        assert not batch.find_refusal_reason(prompt=prompt, most=most)
        batch.add(id, prompt=prompt, most=most, due_at=due_at, tpot_s=0.1)
        ends[id] = min(most, made)
    wrote = dict.fromkeys(ends, 0)
    for number in range(100_000):
        step = batch.next_step()
        if step is None:
            break
        assert len(batch.running) <= rows
        writing = {id for id, request in batch.running.items() if request.is_decoding}
        assert sum(step.tokens) <= (part * step.prefill + (rows if mixes or not step.prefill else 0))
        if mixes or not step.prefill:
            assert writing <= set(step.requests)  # every row that can decode is included
        assert not room or batch.reserved_tokens <= room
        done = [
            id for id, count in zip(step.requests, step.tokens, strict=True) if batch.running[id].unread_tokens == count
        ]
        for id in done:
            wrote[id] += 1
        batch.record_step(step, ended=[id for id in done if wrote[id] == ends[id]])
        if number == 5:
            for id in aborted & set(ends):
                batch.abort(id)
                del ends[id]
    assert len(batch) == 0
    assert {id: wrote[id] for id in ends} == ends


def test_cache_row_size_is_a_power_of_two_or_whole_pages() -> None:
    assert [rounded_row_tokens(tokens) for tokens in (1, 64, 65, 1000)] == [64, 64, 128, 1024]
    paged = BatchLimits(cache_tokens=100, page_tokens=16)
    assert [paged.rounded_row_tokens(tokens) for tokens in (1, 16, 17, 90)] == [16, 16, 32, 96]
    several = (paged, BatchLimits(cache_tokens=100), BatchLimits())
    assert [limits.max_tokens_per_row() for limits in several] == [96, 64, 0]
    assert RunningBatch(paged).find_refusal_reason(prompt=90, most=6) == ""
    assert "need 112 tokens" in RunningBatch(paged).find_refusal_reason(prompt=90, most=7)


def test_peak_memory_estimate_assumes_at_least_the_mean_output() -> None:
    batch = RunningBatch(BatchLimits(cache_tokens=1000, page_tokens=10))
    batch.add(1, prompt=20, most=500)
    assert batch.peak_tokens(prompt=30, output=100) == 120 + 130
    for _ in range(150):
        did_next(batch)
    assert batch.peak_tokens(prompt=30, output=100) == 170 + 130


def test_request_that_waits_for_memory_sets_no_batch_deadline() -> None:
    batch = RunningBatch(BatchLimits(cache_tokens=128))
    batch.add(1, prompt=100, most=20, due_at=50.0, tpot_s=1.0)
    assert batch.next_step() is not None
    batch.add(2, prompt=60, most=4, due_at=10.0, tpot_s=1.0)
    assert batch.due_at == 50.0
    batch.abort(1)
    assert batch.due_at == 10.0
