"""One file writes each field of the manager's state, checked on the sources. A field is identified by its name and its
owner (`library.held`, `manager.state.calls`), also through local names (`held = library.held`, `for listed in
(source.coming, ...)`). Nouns may change themselves in their own files.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
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
"""Names of nouns in the manager's functions."""
OTHERS = frozenset({
    "manager", "self", "trial", "transfers", "client", "cost", "group", "holder", "gang", "orphan", "inbox", "index",
    "object", "fetch", "peer", "fetch.peer", "other", "changes", "level", "core", "source_then", "leader", "child",
    "burst",
})  # fmt: skip
"""Of objects by these names no field is looked for: they are other nouns'."""
WRITERS: dict[type, dict[str, str]] = {
    State: {
        "banned": "clients", "blocks": "blocks", "breaks": "holding", "broken_runs": "holding",
        "calls": "holding", "cancelled": "ending", "clients": "registry", "clients_by_number": "registry",
        "contexts": "registry", "costs": "registry", "departed": "registry", "done": "ending",
        "ended_blocks": "blocks", "ending": "clients", "factory_trouble": "reactor", "failed": "ending",
        "failure_groups": "ending",
        "failed_at": "clients", "failures": "ending", "forecasts": "holding", "forgotten": "pilots",
        "functions": "registry", "gone_libraries": "libraries", "gone_pilots": "pilots", "groups": "registry",
        "hungry": "queues", "kept": "reactor", "kept_ends": "clients", "lease_s": "reactor", "libraries": "libraries",
        "losses": "blocks", "most_pilots": "registry", "next_block": "block_orders", "next_client": "registry",
        "next_library": "libraries", "now": "reactor", "orphans": "pilots", "past_blocks": "blocks",
        "pilots": "pilots", "pilots_gone": "pilots", "printed": "holding",
        "rate": "dispatch", "recorded_at": "ending",
        "reports": "holding", "rerun_calls": "libraries", "reserved": "holding", "said_blocks": "reactor",
        "sources": "blocks", "streams": "holding", "tier_seconds": "libraries", "timers": "manager",
        "trials": "holding",
        "unrecorded": "ending", "unused_functions": "registry"
    },
    Context: {
        "advice": "libraries", "advised_by": "libraries",
        "apart_lacks": "retries", "ask_at": "queues", "asked_at": "reactor",
        "cut_after_s": "libraries",
        "cut_loads": "libraries", "ended": "ending", "failed_on": "libraries",
        "index": "queues", "last_failure": "libraries",
        "libraries": "libraries", "load_failures": "libraries", "load_s": "libraries", "load_total_s": "libraries",
        "limits": "registry", "lists": "queues", "loads": "libraries", "lost_loads": "libraries", "paces": "ending",
        "queue": "queues", "rate": "dispatch", "resident_bytes": "libraries", "run_s": "ending",
        "run_total_s": "ending", "runs": "ending", "said_limits": "registry", "served": "dispatch",
        "slots": "libraries",
        "starved_since": "queues"
    },
    Library: {
        "batch": "libraries", "batch_at": "libraries", "device_bytes": "libraries",
        "ended_at": "holding", "functions": "holding", "held": "holding",
        "line": "libraries", "measured": "libraries", "memory_bytes": "libraries", "phase": "libraries",
        "printed_to": "dispatch", "promised_bytes": "libraries",
        "ready_at": "libraries", "required_bytes": "dispatch", "resizing": "libraries", "served": "dispatch",
        "slots": "libraries",
        "state": "libraries", "stuck": "queues", "taking": "holding", "used_at": "libraries", "zombies": "holding"
    },
    Call: {
        "by_itself": "retries", "holder": "holding", "late": "call_queue", "offered": "holding", "sent_at": "holding",
        "spec": "dispatch", "state": "holding", "ticket": "call_queue"
    },
    CallPast: {"cuts_beside": "retries", "kills": "retries", "notes": "nouns"},
    Pilot: {
        "asked_why": "blame", "cache_bytes": "pilot_reports", "devices": "pilot_reports", "ended": "dispatch",
        "ends_at": "pilots",
        "hellos_asked": "pilot_reports", "kept": "pilots", "lacks": "pilot_reports", "lasts_s": "pilots",
        "libraries": "libraries", "loss": "blocks", "loss_settled": "blocks", "lost_at": "blocks",
        "rate": "dispatch", "refused_frames": "pilot_reports", "released": "pilots", "reserved": "holding",
        "source": "blocks", "state": "pilots", "troubles": "pilot_reports", "unfit": "blame",
        "unfit_times": "blame", "used_at": "libraries", "verdicts": "blame", "was": "pilots"
    },
    Device: {
        "fault": "pilots", "libraries": "libraries", "promised_bytes": "libraries", "quarantine": "pilots",
        "reported": "pilots", "tier": "libraries", "tier_since": "libraries"
    },
    SourceState: {
        "abandoned": "blocks", "blocks": "blocks", "coming": "blocks", "devices": "blocks", "failed_at": "blocks",
        "failures": "blocks", "filling": "blocks", "held_for": "blocks", "hold": "blocks", "last_failure": "blocks",
        "short_lived": "blocks", "source": "blocks", "staying": "blocks", "stopped": "blocks",
        "trouble": "block_orders",
        "useless": "blocks"
    },
    Block: {
        "abandoned": "block_orders", "brought": "blocks", "brought_at": "blocks", "emptied_at": "blocks",
        "expected_at": "blocks", "held_for": "block_orders", "holds": "block_orders",
        "job": "blocks", "leaving": "blocks", "loss": "blocks",
        "phase": "blocks", "pilots": "blocks", "proved": "blocks", "reason": "blocks", "since": "blocks",
        "unsettled": "blocks"
    },
}  # fmt: skip
"""The one file that writes each field; a field that is not here never changes."""


def fields_of(kind: type) -> set[str]:
    fields: tuple[str, ...] = getattr(kind, "__struct_fields__", ()) or getattr(kind, "__slots__", ())
    return set(fields) if kind is not State else set(vars(State("s")))


@cache
def found() -> tuple[dict[type, dict[str, set[str]]], list[str]]:
    """Files that write each field of each noun, and writes to objects of unknown type."""
    writers: dict[type, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    unknown = []
    fields = {kind: fields_of(kind) for kinds in OWNERS.values() for kind in kinds}
    every = set[str]().union(*fields.values())
    for path in sorted(CORE.glob("*.py")):
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
