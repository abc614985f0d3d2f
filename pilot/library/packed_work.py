"""Encodes the work of an engine as bytes. A checksum detects half-written data, as agent and library use no lock."""

from __future__ import annotations

import functools
import math
import struct
import zlib
from itertools import chain

from stoker.contexts.inference.engine_work import EngineWork
from stoker.protocol.ids import LibraryId

MOST_PROMPTS = 32  # maximum number of listed prompts; the last entry merges all remaining prompts
MOST_ANSWERS = 32  # maximum number of listed answers; an engine with more answers lists none
_CHECKSUM = struct.Struct("<I")
_HEAD = struct.Struct("<QIIIddddQQ")
_PROMPT = struct.Struct("<IddI")
_ANSWER = struct.Struct("<ddq")
WORK_BYTES = _CHECKSUM.size + _HEAD.size + MOST_PROMPTS * _PROMPT.size + MOST_ANSWERS * _ANSWER.size
_MOST_TOKENS = 2**32 - 1


@functools.lru_cache(maxsize=MOST_ANSWERS)
def _answers(count: int) -> struct.Struct:
    return struct.Struct("<" + "ddq" * count)


def packed(library: LibraryId, work: EngineWork) -> bytes:
    prompts = list(work.prompts)
    if len(prompts) > MOST_PROMPTS:
        rest = prompts[MOST_PROMPTS - 1 :]
        prompts[MOST_PROMPTS - 1 :] = [(sum(tokens for tokens, *_ in rest), *rest[-1][1:3], 0)]
    rows, length, due_at, tpot_s, late_at, _, accepted_requests, peak, answers = work
    if len(answers) > MOST_ANSWERS:
        answers = ()
    counts = rows, len(prompts), len(answers)
    parts = [_HEAD.pack(library, *counts, length, due_at, tpot_s, late_at, accepted_requests, peak)]
    parts += [
        _PROMPT.pack(min(tokens, _MOST_TOKENS), at, each_s, min(most, _MOST_TOKENS))
        for tokens, at, each_s, most in prompts
    ]
    if answers:
        parts.append(_answers(len(answers)).pack(*chain.from_iterable(answers)))
    data = b"".join(parts)
    return _CHECKSUM.pack(zlib.crc32(data)) + data


def unpacked(data: bytes) -> tuple[LibraryId, EngineWork] | None:
    """Decode a library id and the work of its engine. Return None if the bytes are damaged."""
    library, rows, unread, writing, length, due_at, tpot_s, late_at, accepted_requests, peak = _HEAD.unpack_from(
        data, _CHECKSUM.size
    )
    begin = _CHECKSUM.size + _HEAD.size
    middle = begin + unread * _PROMPT.size
    end = middle + writing * _ANSWER.size
    is_too_long = unread > MOST_PROMPTS or writing > MOST_ANSWERS
    if is_too_long or zlib.crc32(data[_CHECKSUM.size : end]) != _CHECKSUM.unpack_from(data)[0]:
        return None
    prompts = list(_PROMPT.iter_unpack(data[begin:middle]))
    answers = list(_ANSWER.iter_unpack(data[middle:end]))
    lengths = (length, tpot_s, *(each_s for _, _, each_s, _ in prompts), *chain.from_iterable(x[1:] for x in answers))
    times = (due_at, late_at, *(at for _, at, _, _ in prompts), *(at for at, _, _ in answers))
    if not all(0 <= number < math.inf for number in lengths) or any(map(math.isnan, times)):
        return None
    return library, EngineWork(rows, length, due_at, tpot_s, late_at, prompts, accepted_requests, peak, answers)
