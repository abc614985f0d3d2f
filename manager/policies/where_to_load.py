"""Where a context may be loaded, and where a load that failed is tried again. This file alone decides that; residency
policies ask.

After a failed load a context is *probed*: one library is loaded at a time until a load works, or until the core gives
the context up (`stoker.manager.core.libraries`). Pilots on which it failed least come first. A pilot on which it failed
`GIVE_UP_ON_PILOT` times is left alone, unless the context has no library and no other pilot.

A pilot that lacks what a load needs (a full disk) is left alone until it is time to try again
(`stoker.manager.core.blame`): that says nothing of the context, and no probing follows. A pilot whose walltime ends
before the load would be of use is left alone too (`stoker.manager.core.deadlines`).
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.manager.core.blame import why_unfit
from stoker.manager.core.deadlines import load_fits
from stoker.manager.core.nouns import Context, Device, Library, LibraryState, Pilot
from stoker.manager.core.seams import View

GIVE_UP_ON_PILOT = 2
"""A pilot on which a context failed to load so often is left alone while others hold the context or could."""


def may_load(view: View, context: Context, device: Device, *, desperate: bool = False) -> bool:
    """True unless the pilot of a device is to be left alone just now. `desperate`: failed loads there do not count, for
    the context has no library elsewhere, or all pilots are gone through in the order of `failures`."""
    pilot = device.pilot
    if not desperate and failures(context, pilot) >= GIVE_UP_ON_PILOT:
        return False
    return load_fits(view, context, device) and not why_unfit(pilot, context.recipe.key, view.now)


def failures(context: Context, pilot: Pilot) -> int:
    """The rank of a pilot: how often the context failed to load there since a load worked. The least comes first."""
    return context.failed_on.get(pilot.id, 0)


def ranks(context: Context) -> list[int]:
    """The ranks that pilots have, the best first."""
    return sorted({0, *context.failed_on.values()})


def is_probed(context: Context) -> bool:
    """True after a failed load, until one has worked."""
    return context.load_failures > 0


def probes(alive: Iterable[Library]) -> int:
    """How many libraries of a context that is probed may be loaded now, beside those that are hot or on their way."""
    return 0 if any(library.state is LibraryState.LOADING for library in alive) else 1
