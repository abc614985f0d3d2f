"""How much of a device a context takes, as far as anybody knows. Residency plans with it, provisioning judges by it.

Where a context may be loaded, and where a load that failed is tried again. This file alone decides that; residency
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
from stoker.pilot.core.memory import declared_bytes, takes_one_process
from stoker.protocol.to_manager import DeviceFacts

# ---- sizes


BARE_BYTES = 256_000_000
"""What a library that loads nothing is taken to need."""


def known_bytes(context: Context, facts: DeviceFacts) -> int:
    """What the context takes of such a device in bytes: declared, else measured and a tenth more; 0 if not known.

    A device that takes one process at a time is taken whole.
    """
    declared = declared_bytes(context.recipe.needs, facts)
    if declared:
        return declared
    if takes_one_process(facts):
        return facts.memory_bytes
    if not context.recipe.loader:
        return bare_bytes(facts)
    advice = context.advice.get(facts.kind) or context.advice.get("")
    if advice is not None and (advice.peak_bytes or advice.resident_bytes):
        return int(max(advice.peak_bytes, advice.resident_bytes) * 1.1)
    return 0


def bare_bytes(facts: DeviceFacts) -> int:
    """What a library that loads nothing is promised: little of a small device."""
    if takes_one_process(facts):
        return facts.memory_bytes
    return min(BARE_BYTES, facts.memory_bytes // 8)


def is_of_kind(context: Context, facts: DeviceFacts, *, unnamed_spares: bool = False) -> bool:
    """Whether a device is of a kind that the context may be loaded on: by its whole name, or the first word of it.

    The spare cores of a pilot with GPUs are for contexts alone that name them, so that none that is better off on a
    GPU, and says nothing, is loaded there; one over several devices must name nothing else, or it might be split
    between GPUs and cores. `unnamed_spares`: for policies that know how fast a model is there and do without a name.
    """
    needs = context.recipe.needs
    kinds = needs.kinds
    if not kinds:
        return not facts.spare or unnamed_spares
    if facts.kind not in kinds and facts.kind.partition(" ")[0] not in kinds:
        return False
    return not facts.spare or needs.devices == 1 or all(kind.partition(" ")[0] == "cpu" for kind in kinds)


def names_cpus(context: Context) -> bool:
    """True if a context names CPUs among the kinds of devices that it may be loaded on: spare cores will do."""
    return any(kind.partition(" ")[0] == "cpu" for kind in context.recipe.needs.kinds)


def spare_rank(context: Context, facts: DeviceFacts) -> int:
    """Whether a context takes spare cores before other devices (-1) or after them (1): `kinds` has the best first."""
    if not facts.spare:
        return 0
    kinds = context.recipe.needs.kinds
    return -1 if kinds and kinds[0].partition(" ")[0] == facts.kind.partition(" ")[0] else 1


def may_suit(context: Context, device: Device) -> bool:
    """True if a device suits a context, or will when its quarantine is over."""
    return not device.reported and is_of_kind(context, device.facts)


def suits(context: Context, device: Device, *, unnamed_spares: bool = False) -> bool:
    """True if a device is well, and of a kind that the context may be loaded on (`is_of_kind`)."""
    return not device.fault and is_of_kind(context, device.facts, unnamed_spares=unnamed_spares)


# ---- where to load


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
