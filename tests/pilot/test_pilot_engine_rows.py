"""What an engine has to do, as bytes beside its row of the board."""

from __future__ import annotations

import math
import random
import struct
import zlib

import pytest

from stoker.contexts.device_turns import EngineWork, work_of
from stoker.contexts.inference.adapter import GenerationRequest
from stoker.contexts.inference.engine_thread import Generation
from stoker.pilot.library.turn_board import MOST_PROMPTS, WORK_BYTES, packed, unpacked
from stoker.protocol.ids import LibraryId


def generation(
    number: int, *, prompt: int = 10, made: int = 0, due_at: float = math.inf, tpot_s: float = 0.0
) -> Generation:
    found = Generation(GenerationRequest(number, (1,) * prompt, due_at=due_at, tpot_s=tpot_s))
    found.made = made
    return found


def test_work_tells_late_tokens_from_those_that_are_due() -> None:
    requests = [
        generation(1, made=2, due_at=9.0, tpot_s=0.2),  # its next token was due at 9.4
        generation(2, made=1, due_at=10.0, tpot_s=0.5),
        generation(3, prompt=30, made=5),  # nobody waits for it
        generation(4, prompt=50, due_at=12.0, tpot_s=0.3),
        generation(5, prompt=20, due_at=11.0),
    ]
    work = work_of(requests, now=10.0, taken_up=7, mean_output=4.0)
    assert (work.rows, work.length) == (3, (12 + 11 + 35) / 3)
    assert (work.late_at, work.due_at, work.tpot_s) == (pytest.approx(9.4), 10.5, 0.2)
    assert work.prompts == [(20, 11.0, 0.0), (50, 12.0, 0.3)]
    assert (work.taken_up, work.peak_tokens) == (7, 14 + 14 + 35 + 54 + 24)
    assert work_of([], now=10.0, taken_up=7, mean_output=4.0) == EngineWork(prompts=[], taken_up=7)


def test_what_is_packed_is_read_again() -> None:
    work = EngineWork(3, 20.5, 7.0, 0.25, math.inf, [(5, 8.0, 0.25), (6, math.inf, 0.0)], 9, 200)
    data = packed(LibraryId(4), work)
    assert len(data) <= WORK_BYTES
    assert unpacked(data.ljust(WORK_BYTES, b"?")) == (4, work)


def test_many_prompts_are_kept_within_the_row() -> None:
    prompts = [(1, float(number), 0.0) for number in range(100)]
    data = packed(LibraryId(4), EngineWork(prompts=prompts))
    assert len(data) == WORK_BYTES
    found = unpacked(data)
    assert found is not None
    assert found[1].prompts == [*prompts[: MOST_PROMPTS - 1], (100 - MOST_PROMPTS + 1, 99.0, 0.0)]


def test_half_written_and_wrong_bytes_are_no_work() -> None:
    data = bytearray(packed(LibraryId(4), EngineWork(3, 20.5, 7.0)).ljust(WORK_BYTES, b"\0"))
    assert unpacked(bytes(WORK_BYTES)) is None
    chance = random.Random(1)
    for _ in range(500):
        assert unpacked(chance.randbytes(WORK_BYTES)) is None
        wrong = data.copy()
        wrong[chance.randrange(60)] ^= 1 << chance.randrange(8)
        assert unpacked(bytes(wrong)) is None


@pytest.mark.parametrize("number", [math.nan, -1.0, math.inf])
def test_numbers_that_no_engine_has_are_no_work(number: float) -> None:
    data = bytearray(packed(LibraryId(4), EngineWork(3, 20.5, 7.0)).ljust(WORK_BYTES, b"\0"))
    struct.pack_into("<d", data, 4 + 16, number)  # the length, with a sound checksum
    struct.pack_into("<I", data, 0, zlib.crc32(data[4 : 4 + 64]))
    assert unpacked(bytes(data)) is None
