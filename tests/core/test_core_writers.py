"""Check in the source code that one file writes each important field of the manager state.

A field is written through its owner (`library.held`, `manager.state.calls`) or through a local name (`held =
library.held`, `for listed in (source.coming, ...)`). State classes may change themselves.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest
from source_writes import written

import stoker.manager.core

CORE = Path(stoker.manager.core.__file__).parent
WRITERS = {
    "state.calls": "holding", "call.holder": "holding", "call.state": "holding", "library.held": "holding",
    "library.withdrawn_calls": "holding", "library.promised_bytes": "libraries", "library.state": "libraries",
    "device.promised_bytes": "libraries", "pilot.state": "pilots", "context.index": "holding queues",
}  # fmt: skip
"""The files that write the fields on which the manager's promises depend."""
OTHERS = frozenset({"self", "manager", "changes", "burst", "runs"})
"""Other owners of fields with these names."""


def test_each_field_is_written_only_in_the_listed_files() -> None:
    fields = {name.partition(".")[2] for name in WRITERS}
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(CORE.glob("*.py")):
        for field, owner, _ in written(ast.parse(path.read_text())):
            name = owner.rpartition(".")[2]
            if field in fields and name not in OTHERS:
                found[f"{name}.{field}"].add(path.stem)
    assert {name: " ".join(sorted(files)) for name, files in found.items()} == WRITERS


@pytest.mark.parametrize(
    "source",
    [
        "def f(library): library.held[1] = 2",
        "def f(library): del library.held[1]",
        "def f(library): library.held.pop(1)",
        "def f(library):\n    held = library.held\n    held.pop(1)",
        "def f(library):\n    for some in (library.held, library.withdrawn_calls): some.clear()",
        "def f(x, library): x, library.held = 1, {}",
    ],
)
def test_state_writes_are_detected_in_every_syntax(source: str) -> None:
    assert ("held", "library") in {(field, owner) for field, owner, _ in written(ast.parse(source))}
