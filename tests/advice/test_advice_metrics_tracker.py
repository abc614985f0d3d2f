from __future__ import annotations

import random
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks.papers.schedmate.metric_formats import FORMATS, HEADERS, noise, run
from stoker.manager.advice.metrics import FollowedLog, LoggedProgress, MetricTracker, compute_slowdown
from stoker.manager.advice.metrics.lines import read_stated_totals
from stoker.manager.advice.metrics.tracker import TAIL_BYTES, read_newest_lines


def track(lines: Iterable[str], **totals: float) -> LoggedProgress:
    tracker = MetricTracker()
    tracker.totals = totals
    found = tracker.track(list(lines)[::-1])
    assert found is not None
    return found


def bar(done: int, total: int, *, name: str = "", rate: float = 4.0, loss: float | None = None) -> str:
    post = f", loss={loss}" if loss is not None else ""
    return f"{name}{100 * done // total:3}%|###   | {done}/{total} [00:{done % 60:02d}<00:10, {rate:.2f}it/s{post}]"


def test_progress_bar_gives_progress_rate_and_time_left():
    found = track(bar(done, 200, loss=2.0 - done / 200) for done in range(1, 101))
    assert (found.done, found.total, found.unit, found.whole) == (100, 200, "step", True)
    assert found.rate_per_s == 4.0
    assert found.seconds_left == pytest.approx(25.0)
    assert found.loss == 1.5


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_metrics_of_each_known_format_are_found_among_other_lines(form: str):
    chance = random.Random(form)
    lines_of, names = FORMATS[form]
    asked = names.split()
    log = run(form, 2, lines_of)
    lines: list[str] = []
    for _, line in log.lines[-400:]:
        lines += noise(chance)[:5] if chance.random() < 0.3 else []
        lines.append(line)
    header = HEADERS.get(form)
    found = track(lines, **(read_stated_totals(line for _, line in log.lines[:9]) if header else {}))
    assert found.loss == pytest.approx(log.values["loss"], rel=0.02)
    wanted = log.values["overall_step"] if "overall_step" in asked else log.values["step"]
    wanted *= log.values["batch"] if "samples_done" in asked else 1
    assert found.step is not None
    assert abs(found.step - wanted) <= 1
    if "fraction" in asked:
        assert found.total
        assert found.done / found.total == pytest.approx(log.values["fraction"], abs=0.01)
    if "steps_per_s" in asked and form not in ("epoch_lines", "nanogpt"):
        assert found.steps_per_s == pytest.approx(log.values["steps_per_s"], rel=0.2)


def test_progress_follows_the_new_run_after_a_restart_in_the_log():
    lines = [f"step {done}/1000 loss 1.0" for done in range(10, 600, 10)]
    lines += ["Traceback (most recent call last):", "restarting"]
    lines += [f"step {done}/1000 loss 3.0" for done in range(500, 530, 10)]
    found = track(lines)
    assert (found.done, found.total) == (520, 1000)


def test_lines_of_several_ranks_count_as_progress_of_one_program():
    labelled = [f"[rank{rank}]: step {done + rank}/100 loss 1.0" for done in range(1, 50) for rank in (3, 0, 2, 1)]
    found = track(labelled)
    assert (found.done, found.total, found.whole) == (49, 100, True)
    plain = [f"step {done - lag}/100 loss 1.0" for done in range(3, 50) for lag in (0, 2, 1)]
    found = track(plain)
    assert (found.done, found.whole) == (48, True)


def test_outer_of_two_progress_bars_is_the_progress():
    lines = []
    for epoch in range(3):
        lines.append(bar(epoch, 5, name="epochs: ", rate=0.04))
        lines += [bar(done, 100, name="batches: ", loss=1.0) for done in range(1, 101)]
    lines = [
        *lines,
        bar(3, 5, name="epochs: ", rate=0.04),
        *(bar(k, 100, name="batches: ", loss=1.0) for k in range(51)),
    ]
    found = track(lines)
    assert (found.done, found.total, found.unit) == (3.5, 5, "epoch")
    assert found.rate_per_s == pytest.approx(0.04)
    assert found.steps_per_s == 4.0


def test_evaluation_between_steps_is_not_progress():
    lines = [bar(done, 200, loss=1.0) for done in range(1, 101)]
    lines += [bar(done, 20, name="Evaluating: ", rate=50.0) for done in range(10)]
    found = track(lines)
    assert (found.done, found.total, found.steps_per_s, found.evaluates) == (100, 200, 4.0, True)
    unnamed = [bar(done, 200) for done in range(1, 101)] + [bar(done, 20, rate=50.0) for done in range(10)]
    assert track(unnamed).total == 200


def test_timestamps_of_lines_give_a_rate_across_midnight():
    clock = [
        f"{(23 * 3600 + 59 * 60 + 2 * k) // 3600 % 24:02d}:{(59 + 2 * k // 60) % 60:02d}:{2 * k % 60:02d}"
        for k in range(60)
    ]
    found = track(f"{at} step {k}/500 loss 1.0" for k, at in enumerate(clock))
    assert found.steps_per_s == pytest.approx(0.5)


def test_two_reads_give_a_rate_for_a_log_without_timestamps():
    tracker = MetricTracker()
    lines = [f"step {k}/500 loss 1.0" for k in range(101)]
    first = tracker.track(lines[50::-1], at_s=10.0)
    assert first.rate_per_s is None
    second = tracker.track(lines[::-1], at_s=20.0)
    assert second.rate_per_s == pytest.approx(5.0)
    assert second.seconds_left == pytest.approx(80.0)


def test_log_without_metrics_has_no_progress():
    assert MetricTracker().track([]) is None
    assert MetricTracker().track(["hello", "--lr 0.1 --epochs 3", "10.0.0.1/24"] * 5) is None


def test_slowdown_is_the_lost_share_of_the_earlier_rate():
    before, slower = (track(bar(done, 200, rate=rate) for done in range(1, 40)) for rate in (4.0, 2.5))
    assert compute_slowdown(before, slower) == pytest.approx(0.375)
    assert compute_slowdown(None, slower) is None
    assert compute_slowdown(before, None) is None


def newest(path: Path, **settings: int) -> list[str]:
    with path.open("rb") as file:
        return list(read_newest_lines(file.fileno(), path.stat().st_size, **settings))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "job.log"


def test_lines_are_returned_newest_first_without_an_unfinished_line(log: Path):
    log.write_bytes(b"one\r\ntwo\n\n  \nthree\rfour\nfi")
    assert newest(log) == ["four", "three", "two", "one"]
    log.write_bytes(b"one\rtwo [3it/s]")
    assert newest(log) == ["two [3it/s]", "one"]
    log.write_bytes(b"")
    assert newest(log) == []


@pytest.mark.parametrize("length", [5, 16_383, 16_384, 16_385])
def test_lines_across_read_blocks_are_joined(log: Path, length: int):
    lines = [f"{k:06d}" + "x" * (length % 977) for k in range(max(3, 60_000 // length))]
    log.write_text("\n".join(lines) + "\n")
    kept = newest(log)
    assert kept == lines[::-1][: len(kept)]
    assert len(kept) >= min(len(lines), TAIL_BYTES // (len(lines[0]) + 1)) - 1


def test_line_of_100_mb_and_binary_output_have_bounded_cost(log: Path):
    with log.open("wb") as file:
        file.truncate(100_000_000)
        file.seek(100_000_000)
        file.write(b"x" * 300_000)
    began = time.process_time()
    assert FollowedLog(log).track(at_s=0.0) is None
    with log.open("ab") as file:
        file.write(random.Random(1).randbytes(300_000))
    assert FollowedLog(log).track(at_s=0.0) is None
    assert time.process_time() - began < 2.0
    with log.open("ab") as file:
        file.write(b"\nstep 3/9 loss 1.0\n")
    assert FollowedLog(log).track(at_s=0.0).done == 3


def test_truncated_or_replaced_log_counts_as_another_log(log: Path):
    followed = FollowedLog(log)
    log.write_text("max_steps = 500\n" + "".join(f"step {k}: loss 1.0\n" for k in range(100)))
    first = followed.track(at_s=0.0)
    assert (first.done, first.total) == (99, 500)
    log.write_text("step 1: loss 9.0\n")
    second = followed.track(at_s=10.0)
    assert (second.done, second.total, second.rate_per_s) == (1, None, None)
    log.rename(log.with_suffix(".1"))
    log.write_text("".join(f"step {k}/9 loss 1.0\n" for k in range(1, 8)))
    third = followed.track(at_s=20.0)
    assert (third.done, third.total) == (7, 9)
