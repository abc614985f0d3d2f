"""What was measured, as people read it: the staircase, the lengths that pay, and the line for a program."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from statistics import median

from stoker.contexts import EncoderProfile, RuntimeLengths

_WIDTH = 10
_STEADY = 0.05
"""Less than a step of the staircase is: a change of 5 % counts as tiny (`stoker.contexts.RuntimeLengths`)."""


def staircase(profile: EncoderProfile, counts: Sequence[int]) -> list[str]:
    """A row for each length: milliseconds, their spread, milliseconds more than the length before, and the share of the
    texts that are this long and longer than the length before."""
    heads = ["tokens", "ms", "spread", "more", *(["texts"] if counts else [])]
    lines = ["  " + "".join(f"{head:>{_WIDTH}}" for head in heads)]
    shares, before = _shares(profile, counts), None
    for each, share in zip(profile.lengths, shares, strict=True):
        more = "" if before is None else f"{1000 * (each.seconds - before):+.2f}"
        cells = [f"{each.tokens:,}", f"{1000 * each.seconds:.2f}", f"{1000 * each.spread_s:.2f}", more]
        cells += [f"{share:.1%}"] if counts else []
        lines.append("  " + "".join(f"{cell:>{_WIDTH}}" for cell in cells))
        before = each.seconds
    return lines


def advice(model: str, profile: EncoderProfile, pay: RuntimeLengths) -> list[str]:
    """Which lengths pay, why, and what to write in a program."""
    told = {"dtype": profile.dtype, "compiled": profile.compiled}
    options = "".join(f", {name}={value!r}" for name, value in told.items() if value != "auto")
    if len(pay.tokens) == 1:
        why = pay.why.partition(": ")[2]
        lines = [f"one runtime is right, of {pay.tokens[0]:,} tokens: {why}"]
        lines += ["", f"  encoder({model!r}, length={pay.tokens[0]}{options})"]
    else:
        lines = [pay.why, "", f"  encoder_family({model!r}, lengths={list(pay.tokens)}{options})"]
    if not profile.is_compiled:
        lines += [
            "",
            "  note  nothing was compiled on this device: encoder(...) without a length pads no text that is computed"
            " alone, so it is at least as fast",
        ]
    return lines


def too_long(profile: EncoderProfile, counts: Sequence[int]) -> str:
    """Says how many texts no runtime takes; empty if there are none."""
    longest = profile.lengths[-1].tokens
    many = sum(count > longest for count in counts)
    if not many:
        return ""
    return f"{many:,} of {len(counts):,} texts have more than {longest:,} tokens: no runtime takes them whole"


def unsteady(profile: EncoderProfile) -> str:
    """Says that the device did something else meanwhile; empty if times were steady."""
    spread = median(each.spread_s / each.seconds for each in profile.lengths)
    if spread <= _STEADY:
        return ""
    return f"times of one length differ by {spread:.0%} from their median: others use the device; measure again, alone"


def _shares(profile: EncoderProfile, counts: Sequence[int]) -> list[float]:
    tokens = [each.tokens for each in profile.lengths]
    found = [0] * (len(tokens) + 1)
    for count in counts:
        found[bisect_left(tokens, count)] += 1
    return [each / max(1, len(counts)) for each in found[:-1]]
