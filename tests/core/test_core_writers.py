"""One file writes each piece of the manager's state: who changes the fields of its nouns, read off the sources.

A field is found by its name and by what holds it (`library.held`, `manager.state.calls`), also through a local name for
it (`held = library.held`, `for listed in (source.coming, ...)`). Nouns may change themselves in their own files.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest
from source_writes import written

import stoker.manager.core
from stoker.manager.core.nouns import Call, CallPast, Context, Device, Library, Pilot
from stoker.manager.core.state import Block, SourceState, State

CORE = Path(stoker.manager.core.__file__).parent
OWNERS = {
    "block": (Block,), "call": (Call,), "context": (Context,), "device": (Device,), "library": (Library,),
    "past": (CallPast,), "known": (SourceState, Pilot), "pilot": (Pilot,), "source": (SourceState,), "state": (State,),
}  # fmt: skip
"""What the manager's functions call its nouns."""
OTHERS = frozenset({
    "manager", "self", "trial", "transfers", "client", "cost", "group", "holder", "gang", "orphan", "inbox", "index",
    "object", "fetch", "peer", "fetch.peer", "other", "changes", "level", "core", "source_then", "leader", "child",
    "burst",
})  # fmt: skip
"""Of objects by these names no field is looked for: they are other nouns'."""
WRITERS: dict[type, dict[str, str]] = {
    State: {
        "banned": "departures", "blocks": "blocks", "breaks": "call_records", "broken_runs": "call_records",
        "calls": "holding", "cancelled": "ending", "clients": "registry", "clients_by_number": "registry",
        "contexts": "registry", "costs": "registry", "departed": "registry", "done": "ending",
        "ended_blocks": "blocks", "ending": "session_end", "factory_trouble": "blocks", "failed": "ending",
        "failure_groups": "failure_groups",
        "failed_at": "refusing", "failures": "ending", "forecasts": "call_records", "forgotten": "repair",
        "functions": "registry", "gone_libraries": "libraries", "gone_pilots": "pilot_states", "groups": "registry",
        "hungry": "queues", "kept": "core", "kept_ends": "holes", "lease_s": "core", "libraries": "libraries",
        "losses": "losses", "most_pilots": "registry", "next_block": "blocks", "next_client": "registry",
        "next_library": "libraries", "now": "core", "orphans": "repair", "past_blocks": "blocks",
        "pilots": "pilot_states", "pilots_gone": "pilot_states", "printed": "call_records",
        "rate": "call_ends", "recorded_at": "accounting",
        "reports": "call_records", "rerun_calls": "libraries", "reserved": "reservations", "said_blocks": "clients",
        "sources": "blocks", "streams": "call_records", "tier_seconds": "libraries", "timers": "manager",
        "trials": "reservations",
        "unrecorded": "accounting", "unused_functions": "registry",
    },
    Context: {
        "advice": "loads", "advised_by": "loads", "apart_lacks": "suspects", "ask_at": "queues", "asked_at": "core",
        "cut_after_s": "loads",
        "cut_loads": "loads", "ended": "ending", "failed_on": "loads", "index": "indexing", "last_failure": "loads",
        "libraries": "libraries", "load_failures": "loads", "load_s": "loads", "load_total_s": "loads",
        "limits": "limits", "lists": "variants", "loads": "loads", "lost_loads": "loads", "paces": "accounting",
        "queue": "queues", "rate": "call_ends", "resident_bytes": "loads", "run_s": "accounting",
        "run_total_s": "accounting", "runs": "accounting", "said_limits": "limits", "served": "call_ends",
        "slots": "loads",
        "starved_since": "queues",
    },
    Library: {
        "batch": "library_messages", "batch_at": "library_messages", "device_bytes": "libraries",
        "ended_at": "holding", "functions": "sending", "held": "holding",
        "line": "pilots", "measured": "libraries", "memory_bytes": "libraries", "phase": "pilots",
        "printed_to": "call_ends", "promised_bytes": "libraries",
        "ready_at": "libraries", "required_bytes": "call_updates", "resizing": "libraries", "served": "call_ends",
        "slots": "libraries",
        "state": "libraries", "stuck": "indexing", "taking": "holding", "used_at": "libraries", "zombies": "holding",
    },
    Call: {
        "by_itself": "poison", "holder": "holding", "late": "queue", "offered": "holding", "sent_at": "holding",
        "spec": "call_updates", "state": "holding", "ticket": "queue",
    },
    CallPast: {"cuts_beside": "poison", "kills": "poison", "notes": "nouns"},
    Pilot: {
        "asked_why": "verdicts", "cache_bytes": "heartbeats", "devices": "pilots", "ended": "call_ends",
        "ends_at": "draining",
        "hellos_asked": "pilots", "kept": "pilot_states", "lacks": "pilots", "lasts_s": "draining",
        "libraries": "libraries", "loss": "losses", "loss_settled": "losses", "lost_at": "losses",
        "rate": "call_ends", "refused_frames": "heartbeats", "released": "pilot_states", "reserved": "reservations",
        "source": "blocks", "state": "pilot_states", "troubles": "pilots", "unfit": "fitness",
        "unfit_times": "fitness", "used_at": "libraries", "verdicts": "verdicts", "was": "pilot_states",
    },
    Device: {
        "fault": "quarantine", "libraries": "libraries", "promised_bytes": "libraries", "quarantine": "quarantine",
        "reported": "quarantine", "tier": "libraries", "tier_since": "libraries",
    },
    SourceState: {
        "abandoned": "blocks", "blocks": "blocks", "coming": "blocks", "devices": "blocks", "failed_at": "blocks",
        "failures": "blocks", "filling": "blocks", "held_for": "blocks", "hold": "blocks", "last_failure": "blocks",
        "short_lived": "blocks", "source": "blocks", "staying": "blocks", "stopped": "blocks", "trouble": "blocks",
        "useless": "blocks",
    },
    Block: {
        "abandoned": "blocks", "brought": "blocks", "brought_at": "blocks", "emptied_at": "blocks",
        "expected_at": "blocks", "held_for": "block_updates", "holds": "block_updates",
        "job": "blocks", "leaving": "blocks", "loss": "blocks",
        "phase": "blocks", "pilots": "blocks", "proved": "blocks", "reason": "blocks", "since": "blocks",
        "unsettled": "losses",
    },
}  # fmt: skip
"""The one file that writes each field; a field that is not here never changes."""


def fields_of(kind: type) -> set[str]:
    fields: tuple[str, ...] = getattr(kind, "__struct_fields__", ()) or getattr(kind, "__slots__", ())
    return set(fields) if kind is not State else set(vars(State("s")))


def found() -> tuple[dict[type, dict[str, set[str]]], list[str]]:
    """Which files write each field of each noun, and what is written in something of which nothing is known."""
    writers: dict[type, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    unknown = []
    fields = {kind: fields_of(kind) for kinds in OWNERS.values() for kind in kinds}
    every = set[str]().union(*fields.values())
    for path in sorted(CORE.glob("*.py")):
        if path.stem == "overlay":  # what it writes is imagined
            continue
        for field, owner, line in written(ast.parse(path.read_text())):
            if field == "transfers":  # it changes itself
                continue
            name = owner.rpartition(".")[2]
            kinds = [kind for kind in OWNERS.get(name, ()) if field in fields[kind]]
            for kind in kinds:
                writers[kind][field].add(path.stem)
            if not kinds and name not in OWNERS and name not in OTHERS and field in every:
                unknown.append(f"{path.name}:{line} {owner}.{field}")
    return writers, unknown


@pytest.mark.parametrize("kind", WRITERS, ids=lambda kind: kind.__name__)
def test_each_field_has_one_file_that_writes_it(kind: type) -> None:
    writers, _ = found()
    assert {field: " ".join(sorted(files)) for field, files in writers[kind].items()} == WRITERS[kind]


def test_nothing_is_written_by_a_name_that_tells_no_noun() -> None:
    _, unknown = found()
    assert not unknown, "call it as its noun is called, or name it among OTHERS"


@pytest.mark.parametrize(
    "source",
    [
        "def f(library): library.held[1] = 2",
        "def f(library): del library.held[1]",
        "def f(library): library.held.pop(1)",
        "def f(library):\n    held = library.held\n    held.pop(1)",
        "def f(library):\n    for some in (library.held, library.zombies): some.clear()",
        "def f(x, library): x, library.held = 1, {}",
    ],
)
def test_a_write_is_seen_in_each_of_its_shapes(source: str) -> None:
    assert ("held", "library") in {(field, owner) for field, owner, _ in written(ast.parse(source))}
