"""How much of a device a context takes, as far as anybody knows. Residency plans with it, provisioning judges by it."""

from __future__ import annotations

from stoker.manager.core.nouns import Context, Device
from stoker.pilot.core.memory import declared_bytes, takes_one_process
from stoker.protocol.to_manager import DeviceFacts

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
