"""The end of a growing log."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.manager.advice.metrics import FollowedLog
from stoker.manager.advice.metrics.tracker import LOOK_BYTES, newest_lines


def newest(path: Path, **settings: int) -> list[str]:
    with path.open("rb") as file:
        return list(newest_lines(file.fileno(), path.stat().st_size, **settings))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "job.log"


def test_lines_come_newest_first_without_an_unfinished_one(log: Path):
    log.write_bytes(b"one\r\ntwo\n\n  \nthree\rfour\nfi")
    assert newest(log) == ["four", "three", "two", "one"]
    log.write_bytes(b"one\rtwo [3it/s]")
    assert newest(log) == ["two [3it/s]", "one"]
    log.write_bytes(b"")
    assert newest(log) == []


@pytest.mark.parametrize("length", [5, 100, 16_383, 16_384, 16_385, 40_000])
def test_lines_across_blocks(log: Path, length: int):
    lines = [f"{k:06d}" + "x" * (length % 977) for k in range(max(3, 60_000 // length))]
    log.write_text("\n".join(lines) + "\n")
    kept = newest(log)
    assert kept == lines[::-1][: len(kept)]
    assert len(kept) >= min(len(lines), LOOK_BYTES // (len(lines[0]) + 1)) - 1


def test_a_look_reads_a_bounded_part(log: Path, monkeypatch: pytest.MonkeyPatch):
    log.write_text("".join(f"step {k}/100000 loss 1.0\n" for k in range(100_000)))
    read = 0
    pread = os.pread

    def counted(descriptor: int, count: int, offset: int) -> bytes:
        nonlocal read
        read += count
        return pread(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", counted)
    tracked = FollowedLog(log).track(at_s=0.0)
    assert tracked.progress.done == 99_999
    assert read <= LOOK_BYTES + 65_536


def test_one_line_of_100_mb_and_binary_output_cost_no_more(log: Path):
    with log.open("wb") as file:
        file.truncate(100_000_000)
        file.seek(100_000_000)
        file.write(b"x" * 300_000)
    began = time.process_time()
    tracked = FollowedLog(log).track(at_s=0.0)
    assert tracked.progress is None
    with log.open("ab") as file:
        file.write(random.Random(1).randbytes(300_000))
    assert FollowedLog(log).track(at_s=0.0).progress is None
    assert time.process_time() - began < 2.0
    with log.open("ab") as file:
        file.write(b"\nstep 3/9 loss 1.0\n")
    tracked = FollowedLog(log).track(at_s=0.0)
    assert tracked.progress.done == 3


def test_a_log_that_is_truncated_or_replaced_is_another_log(log: Path):
    followed = FollowedLog(log)
    log.write_text("max_steps = 500\n" + "".join(f"step {k}: loss 1.0\n" for k in range(100)))
    first = followed.track(at_s=0.0).progress
    assert (first.done, first.total) == (99, 500)
    log.write_text("step 1: loss 9.0\n")
    second = followed.track(at_s=10.0).progress
    assert (second.done, second.total, second.rate_per_s) == (1, None, None)
    log.rename(log.with_suffix(".1"))
    log.write_text("".join(f"step {k}/9 loss 1.0\n" for k in range(1, 8)))
    third = followed.track(at_s=20.0).progress
    assert (third.done, third.total) == (7, 9)


def test_truncation_in_the_middle_of_a_look(log: Path):
    log.write_text("".join(f"step {k}/9999 loss 1.0\n" for k in range(9_000)))
    with log.open("r+b") as file:
        lines: Iterator[str] = newest_lines(file.fileno(), log.stat().st_size)
        assert next(lines) == "step 8999/9999 loss 1.0"
        file.truncate(10)
        assert len(list(lines)) < 2_000


def test_a_log_that_did_not_grow_is_not_read_again(log: Path):
    log.write_text("step 3/9 loss 1.0\n")
    followed = FollowedLog(log)
    assert followed.track(at_s=0.0) is followed.track(at_s=1.0)


def test_a_log_that_is_not_there_has_a_reason(log: Path):
    tracked = FollowedLog(log).track(at_s=0.0)
    assert tracked.progress is None
    assert "No such file" in tracked.why
