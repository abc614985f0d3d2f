"""Logs with any content give a verdict or None and raise no exception."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.manager.advice.logs import Fault, classify_failure, locate_failure
from stoker.manager.advice.logs.reading import LONGEST_BYTES, read_log_blocks

TRACEBACK = b"Traceback (most recent call last):\n  File \"/home/ada/train.py\", line 4, in main\nKeyError: 'label'\n"
MOST_BYTES = 24 << 20
"""Maximum bytes of memory to read a log of any size."""


def verdict(source: object) -> Fault | None:
    located = locate_failure(source)  # type: ignore[arg-type]
    if located is None:
        return None
    fault = classify_failure(located)
    assert fault.proof
    for line in (*located.window, *located.error_lines, *located.traceback, *fault.proof):
        line.text.encode()  # `encode` raises an error for a lone surrogate
        assert len(line.text) <= LONGEST_BYTES
    return fault


def in_bounds(work: Callable[[], Fault | None]) -> Fault | None:
    tracemalloc.start()
    try:
        found = work()
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    return found


@pytest.mark.parametrize("filler", [b"error ", b"\xe2\x82"])
def test_line_of_30_mb_in_a_file_takes_little_memory(tmp_path: Path, filler: bytes):
    path = tmp_path / "log"
    with path.open("wb") as file:
        block = (filler * (1 << 20))[: 1 << 20]
        file.write(b"step 1\n")
        for _ in range(30):
            file.write(block)
        file.write(b"\n" + TRACEBACK)
    fault = in_bounds(lambda: verdict(path))
    assert "KeyError: 'label'" in [line.text for line in fault.proof]


def test_progress_bar_with_200000_redraws_is_read_in_seconds():
    began = time.process_time()
    fault = verdict(b"".join(b"%d%% |##\r" % part for part in range(200_000)) + TRACEBACK)
    assert "KeyError: 'label'" in [line.text for line in fault.proof]
    assert time.process_time() - began < 20


def test_exception_with_a_message_of_30_mb_keeps_its_type():
    class Pipe:
        def __init__(self) -> None:
            self.parts = iter([TRACEBACK.rpartition(b"KeyError")[0], b"ValueError: ", *[b"y" * (1 << 20)] * 30])

        def read(self, size: int) -> bytes:
            return next(self.parts, b"")

    fault = in_bounds(lambda: verdict(Pipe()))
    assert any(line.text.startswith("ValueError: yyy") for line in fault.proof)


def test_log_with_an_incomplete_or_split_utf_8_character_is_read():
    euro = "€".encode()
    assert verdict(TRACEBACK + b"KeyError: " + euro[:2]) is not None
    whole = (b"a" * ((256 << 10) - 1)) + euro + b"\n" + TRACEBACK
    assert verdict(whole) is not None


def test_lone_surrogates_are_shown_as_question_marks():
    fault = verdict(["step 1", "ValueError: \ud800 bad name \udcff"])
    assert fault.proof[0].text == "ValueError: ? bad name ?"


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.binary(max_size=200), st.text(max_size=80), st.just(TRACEBACK), st.just("error: \x00lost")))
)
def test_arbitrary_log_lines_raise_no_error(lines: list[bytes | str]):
    verdict(lines)


def test_growing_file_is_read_up_to_its_size_at_the_start(tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(b"step 1\n" * 100_000)
    blocks = read_log_blocks(path)
    read = len(next(blocks))
    with path.open("ab") as file:
        file.write(TRACEBACK * 100)
    assert read + sum(map(len, blocks)) == 700_000


def test_many_kinds_of_bad_lines_take_bounded_memory_and_time():
    letters = str.maketrans("0123456789", "abcdefghij")
    lines = (f"error in {f'{number:07d}'.translate(letters)}: failed" for number in range(10_000))
    began = time.process_time()
    fault = in_bounds(lambda: verdict(lines))
    assert fault is not None
    assert time.process_time() - began < 60


@pytest.mark.parametrize(
    "unit",
    ["error", "error=", "A.b_", "0 errors ", "fail-", "((((", "CUDA error ", "http 5", "[rank1]: ", "\t ", "*** "],
)
def test_long_repetitive_line_is_classified_in_seconds(unit: str):
    line = unit * (LONGEST_BYTES // len(unit))
    began = time.process_time()
    verdict([line, "Traceback (most recent call last):", f'  File "{line}", line 1', line, f"{line}: {line}"])
    assert time.process_time() - began < 10
