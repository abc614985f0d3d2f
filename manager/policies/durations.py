"""Whether a context could be loaded, and a call done, in the time that a pilot has. Residency and provisioning ask.

A load that nobody has measured may still be known to be long: when the walltime of its pilots was over it was under way
yet. One such load may have been bad luck (a slow file system, a pilot that was nearly over); two are taken for a bound.
"""

from __future__ import annotations

from stoker.manager.core.nouns import Context
from stoker.manager.core.walltime import margin_s
from stoker.manager.protocol.blocks import Source
from stoker.units import show_seconds

_CAUTION = 1.2
"""A load is taken to last this much longer than was measured."""
_CUTS = 2


def load_s(context: Context, kind: str) -> float:
    """Seconds that a load takes, at least, on a kind of device (`""`: any); 0 = nobody knows."""
    advice = context.advice.get(kind)
    known = advice.load_s if advice is not None and advice.load_s else context.load_s
    return known or (context.cut_after_s if context.cut_loads >= _CUTS else 0.0)


def has_time(context: Context, kind: str, *, left_s: float, lasts_s: float) -> bool:
    """Whether it can be loaded before a pilot is drained, and run a call before that one's end: `left_s` of the
    `lasts_s` that it has in all are left."""
    needed_s = _CAUTION * load_s(context, kind)
    if not needed_s:
        return True
    return needed_s < left_s - margin_s(lasts_s, run_s=context.run_s) and needed_s + context.run_s < left_s


def fits(context: Context, source: Source) -> bool:
    """Whether a pilot of this source could do that, if it began at once."""
    lasts_s = source.walltime_s
    return not lasts_s or has_time(context, source.kind, left_s=lasts_s, lasts_s=lasts_s)


def in_words(context: Context) -> str:
    """How long it takes, as far as anybody knows."""
    if context.load_s:
        calls = f" and its calls {show_seconds(context.run_s)}" if context.run_s else ""
        return f"takes {show_seconds(context.load_s)} to load{calls}"
    cut = f"was still loading after {show_seconds(context.cut_after_s)}"
    return f"{cut} when its pilot's walltime was over ({context.cut_loads} times)"
