"""What an engine has to do, as bytes beside its row of the board of turns.

The engine's library writes it before each step without a lock, and the agent reads it whenever it weighs an offer. A
checksum tells what was written half, or by somebody else, so nobody has to wait for anybody.
"""

from __future__ import annotations

import math
import struct
import zlib

from stoker.contexts.device_turns import EngineWork
from stoker.protocol.ids import LibraryId

MOST_PROMPTS = 32
"""Unread prompts that stand there, the most urgent. All further ones are the last of them together: as many tokens, due
when the last is."""
_SUM = struct.Struct("<I")
_HEAD = struct.Struct("<QIIddddQQ")
_PROMPT = struct.Struct("<Idd")
WORK_BYTES = _SUM.size + _HEAD.size + MOST_PROMPTS * _PROMPT.size
_MOST = 2**32 - 1


def packed(library: LibraryId, work: EngineWork) -> bytes:
    """The bytes of what a library's engine has to do."""
    prompts = list(work.prompts)
    if len(prompts) > MOST_PROMPTS:
        rest = prompts[MOST_PROMPTS - 1 :]
        prompts[MOST_PROMPTS - 1 :] = [(sum(tokens for tokens, _, _ in rest), rest[-1][1], rest[-1][2])]
    rows, length, due_at, tpot_s, late_at, _, taken_up, peak = work
    parts = [_HEAD.pack(library, rows, len(prompts), length, due_at, tpot_s, late_at, taken_up, peak)]
    parts += [_PROMPT.pack(min(tokens, _MOST), at, each_s) for tokens, at, each_s in prompts]
    data = b"".join(parts)
    return _SUM.pack(zlib.crc32(data)) + data


def unpacked(data: bytes) -> tuple[LibraryId, EngineWork] | None:
    """A library, and what its engine has to do; None for bytes that are neither, or are being written."""
    library, rows, count, length, due_at, tpot_s, late_at, taken_up, peak = _HEAD.unpack_from(data, _SUM.size)
    if count > MOST_PROMPTS:
        return None
    end = _SUM.size + _HEAD.size + count * _PROMPT.size
    if zlib.crc32(data[_SUM.size : end]) != _SUM.unpack_from(data)[0]:
        return None
    prompts = [_PROMPT.unpack_from(data, end - left * _PROMPT.size) for left in range(count, 0, -1)]
    lengths = (length, tpot_s, *(each_s for _, _, each_s in prompts))
    if not all(0 <= number < math.inf for number in lengths) or any(map(math.isnan, (due_at, late_at))):
        return None
    if any(math.isnan(at) for _, at, _ in prompts):
        return None
    return library, EngineWork(rows, length, due_at, tpot_s, late_at, prompts, taken_up, peak)
