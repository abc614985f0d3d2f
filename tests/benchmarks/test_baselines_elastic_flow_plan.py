from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.elastic_flow_plan import Free, Job, Share, admits, by_two, elastic_sizes, fill, minimum_shares

LINEAR = ((1, 100.0), (2, 50.0), (4, 25.0), (8, 12.5))
POOR = ((1, 100.0), (2, 90.0), (4, 85.0))


def job(id: int, due: float, run_s: tuple[tuple[int, float], ...] = LINEAR, **how: float) -> Job:
    return Job(id, due, run_s, **how)  # type: ignore[arg-type]


def share_of(*pieces: tuple[float, float, int]) -> Share:
    return Share(pieces)


@pytest.mark.parametrize(("due", "size"), [(100.0, 1), (99.0, 2), (50.0, 2), (26.0, 4), (25.0, 4), (13.0, 8)])
def test_job_gets_the_fewest_devices_that_meet_its_deadline(due: float, size: int) -> None:
    assert minimum_shares([job(1, due)], 8, now=0.0)[1].pieces[0][2] == size

    assert minimum_shares([job(1, 12.0)], 8, now=0.0) == {}
    assert minimum_shares([job(1, 25.0)], 3, now=0.0) == {}, "four devices are needed and there are three"


def test_job_with_the_nearer_deadline_gets_devices_first() -> None:
    shares = minimum_shares([job(1, 50.0), job(2, 25.0)], 4, now=0.0)
    assert shares == {2: share_of((0.0, 25.0, 4)), 1: share_of((25.0, 50.0, 4))}


def test_share_is_smaller_while_other_jobs_need_the_devices() -> None:
    # Job 1 has 2 of 4 devices until 50 s. Until then job 2 finishes half of its work on the other 2 devices.
    slow = ((1, 200.0), (2, 100.0), (4, 50.0))
    shares = minimum_shares([job(1, 50.0), job(2, 80.0, slow)], 4, now=0.0)
    assert shares == {1: share_of((0.0, 50.0, 2)), 2: share_of((0.0, 50.0, 2), (50.0, 75.0, 4))}
    assert minimum_shares([job(1, 50.0), job(2, 74.0, slow)], 4, now=0.0).keys() == {1}


def test_job_sizes_are_powers_of_two_that_give_a_speedup() -> None:
    seconds = ((1, 100.0), (2, 60.0), (3, 40.0), (4, 35.0), (8, 36.0))
    assert by_two(seconds) == ((1, 100.0), (2, 60.0), (4, 35.0))
    assert by_two(seconds, unit=4) == ((4, 100.0), (8, 60.0), (16, 35.0))
    assert by_two(seconds, smallest=2) == ((2, 60.0), (4, 35.0))
    assert by_two(((3, 40.0),), smallest=3) == ((3, 40.0),)
    assert fill(job(1, 0.0), 8, Free(7, now=0.0)) == share_of((0.0, 25.0, 4))


def test_running_job_keeps_its_size_if_a_change_makes_it_late() -> None:
    runs = job(1, 60.0, ((1, 50.0), (2, 30.0), (4, 20.0)), size=2, start_s=15.0)
    assert minimum_shares([runs], 8, now=0.0)[1] == share_of((0.0, 30.0, 2))
    patient = job(1, 65.0, ((1, 50.0), (2, 30.0), (4, 20.0)), size=2, start_s=15.0)
    assert minimum_shares([patient], 8, now=0.0)[1] == share_of((0.0, 65.0, 1))


def test_job_that_would_make_another_job_late_is_refused() -> None:
    urgent = job(3, 10.0, ((1, 10.0),))
    assert admits(urgent, [job(1, 30.0)], 4, now=0.0)
    assert not admits(urgent, [job(1, 25.0)], 4, now=0.0)
    assert minimum_shares([urgent, job(1, 25.0)], 4, now=0.0).keys() == {3}

    assert admits(job(2, 100.0), [job(1, 5.0)], 4, now=0.0), "the other is late whatever happens"
    line = [job(n, 25.0 * n) for n in range(1, 5)]
    assert all(admits(line[n], line[:n], 4, now=0.0) for n in range(4))
    assert not admits(job(5, 99.0, ((1, 4.0),)), line, 4, now=0.0)


def test_spare_devices_go_where_they_cost_the_least_device_time() -> None:
    jobs = [job(1, 100.0, POOR), job(2, 100.0)]
    shares = minimum_shares(jobs, 8, now=0.0)
    assert elastic_sizes(jobs, shares, 5, now=0.0) == {1: 1, 2: 4}
    assert elastic_sizes(jobs, shares, 4, now=0.0) == {1: 2, 2: 2}, "two more for the one that scales are not there"
    assert elastic_sizes(jobs, shares, 16, now=0.0) == {1: 4, 2: 8}


seconds = st.floats(1.0, 500.0)
jobs = st.lists(
    st.builds(
        lambda due, one, gain, size, start: (due, tuple((2**k, one * gain**k) for k in range(4)), size, start),
        seconds, seconds, st.floats(0.4, 0.95), st.sampled_from((0, 1, 2, 4)), st.floats(0.0, 60.0),
    ),
    max_size=8,
)  # fmt: skip


@given(jobs, st.integers(1, 16))
def test_shares_meet_deadlines_and_never_exceed_the_devices(
    specs: list[tuple[float, tuple, int, float]], devices: int
) -> None:
    line = [job(n, due, run_s, size=size, start_s=start) for n, (due, run_s, size, start) in enumerate(specs)]
    shares = minimum_shares(line, devices, now=0.0)
    for id, share in shares.items():
        assert share.ends_at <= line[id].deadline_at
    moments = {start for share in shares.values() for start, _, _ in share.pieces}
    for at in moments:
        assert sum(share.size_at(at) for share in shares.values()) <= devices
    sizes = elastic_sizes(line, shares, devices, now=0.0)
    assert sum(sizes.values()) <= devices
    assert all(sizes[id] >= share.size_at(0.0) for id, share in shares.items())
    assert all(size in (0, 1, 2, 4, 8) for size in sizes.values())


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), max_size=6))
def test_all_jobs_meet_their_deadlines_on_one_device_if_possible(specs: list[tuple[int, int]]) -> None:
    """On one device, filling in order of deadlines equals earliest deadline first."""
    line = [job(n, float(due), ((1, float(run)),)) for n, (due, run) in enumerate(specs)]
    possible = all(sum(run for due, run in specs if due <= at) <= at for at, _ in specs)
    assert (len(minimum_shares(line, 1, now=0.0)) == len(line)) == possible
