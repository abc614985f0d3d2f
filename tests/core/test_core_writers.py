"""Check in the source code that one file writes each field of the manager state.

A field has a name and an owner (`library.held`, `manager.state.calls`), also through local names (`held =
library.held`, `for listed in (source.coming, ...)`). State classes may change themselves.
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
"""State classes by variable name in the manager's functions."""
OTHERS = frozenset({
    "manager", "self", "trial", "transfers", "client", "cost", "group", "holder", "gang", "orphan", "inbox", "index",
    "object", "fetch", "peer", "fetch.peer", "other", "changes", "level", "core", "source_then", "leader", "child",
    "burst",
})  # fmt: skip
"""Other objects by these names; their fields are not checked."""
WRITERS = {
    (State, "calls"): "holding", (Context, "queue"): "queues", (Call, "holder"): "holding", (Call, "state"): "holding",
    (Library, "held"): "holding", (Library, "zombies"): "holding", (Library, "promised_bytes"): "libraries",
    (Library, "state"): "libraries", (Device, "promised_bytes"): "libraries", (Pilot, "state"): "pilots",
}  # fmt: skip
"""The files that write the most important fields."""


def fields_of(kind: type) -> set[str]:
    fields: tuple[str, ...] = getattr(kind, "__struct_fields__", ()) or getattr(kind, "__slots__", ())
    return set(fields) if kind is not State else set(vars(State("s")))


@cache
def found() -> tuple[dict[type, dict[str, set[str]]], list[str]]:
    """Return the files that write each field of each class, and writes to unknown objects."""
    writers: dict[type, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    unknown = []
    fields = {kind: fields_of(kind) for kinds in OWNERS.values() for kind in kinds}
    every = set[str]().union(*fields.values())
    for path in sorted(CORE.glob("*.py")):
        for field, owner, line in written(ast.parse(path.read_text())):
            if field == "transfers":  # the transfer plan has its own class, which changes itself
                continue
            name = owner.rpartition(".")[2]
            kinds = [kind for kind in OWNERS.get(name, ()) if field in fields[kind]]
            for kind in kinds:
                writers[kind][field].add(path.stem)
            if not kinds and name not in OWNERS and name not in OTHERS and field in every:
                unknown.append(f"{path.name}:{line} {owner}.{field}")
    return writers, unknown


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kinds in OWNERS.values() for kind in kinds))
def test_each_state_field_is_written_by_one_file(kind: type) -> None:
    writers, _ = found()
    assert len(writers[kind]) > 2
    assert not {field: files for field, files in writers[kind].items() if len(files) > 1}
    for (owner, field), file in WRITERS.items():
        assert kind is not owner or writers[owner][field] == {file}


def test_state_is_written_only_through_typed_names() -> None:
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
def test_state_writes_are_detected_in_every_syntax(source: str) -> None:
    assert ("held", "library") in {(field, owner) for field, owner, _ in written(ast.parse(source))}
