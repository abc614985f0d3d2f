"""Only listed source files write each field of the pilot state: one file each for calls, objects and memory."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from source_writes import written

import stoker.pilot.core

CORE = Path(stoker.pilot.core.__file__).parent
OUT_TRAY = {("state", "out")}
"""Outputs that every file may append to."""

WRITERS: dict[str, dict[str, str]] = {
    "library": {
        "arguments": "running",
        "asked_back_at": "limits reactor",
        "asleep_at": "sleeping",
        "asleep_bytes": "sleeping",
        "awake_bytes": "sleeping",
        "awaits_forms": "starting",
        "cache_lacks_bytes": "starting",
        "cache": "reactor",
        "cause": "limits running",
        "device_bytes": "limits reactor",
        "fetched_at": "starting",
        "forms": "starting",
        "garbled": "reactor",
        "has_limits": "running",
        "has_pins": "starting",
        "has_process": "memory",
        "held": "running",
        "hello_at": "reactor",
        "hung_up_at": "limits reactor",
        "is_killed": "lifecycle",
        "is_over": "limits",
        "is_settled": "limits memory",
        "last_line": "presence",
        "missing": "objects starting",
        "moving_since": "limits sleeping",
        "orders_back": "limits running",
        "orders_waiting_for_arguments": "running",
        "paths": "starting",
        "pid": "reactor",
        "ready_at": "reactor",
        "resident_bytes": "presence reactor",
        "resizes": "memory",
        "served": "running",
        "sleeps": "reactor",
        "slots": "reactor",
        "stage": "lifecycle",
        "started_at": "limits starting",
        "stopping": "lifecycle running",
        "streams": "running",
        "stuck": "lifecycle running",
        "stuck_at": "lifecycle",
        "times_idle": "limits reactor",
        "told_to_end": "lifecycle presence",
        "void_order": "limits",
        "waiting": "running",
        "wake_to": "sleeping",
    },
    "state": {
        "answered": "reactor",
        "claims": "memory",
        "drain_at": "presence",
        "ends_at": "presence",
        "exit_code": "lifecycle",
        "faults": "probes",
        "gone": "lifecycle",
        "greeted_at": "presence",
        "uploads_pending": "running",
        "hands_on_until": "reactor",
        "has_ended": "presence",
        "heartbeat_at": "presence reactor",
        "heartbeat_s": "reactor",
        "hello_is_due": "presence reactor",
        "hellos": "presence",
        "host_claims": "memory sleeping",
        "is_unfit": "reactor",
        "last_library": "starting",
        "last_ticket": "running",
        "lease_s": "reactor",
        "leave_by": "lifecycle presence",
        "leaving": "lifecycle",
        "libraries": "lifecycle starting",
        "loss": "lifecycle",
        "now": "core",
        "says_farewell": "reactor",
        "serves_until": "lifecycle",
        "snapshots": "reactor",
        "step_times": "starting",
        "stops": "limits",
        "told": "objects presence reactor",
        "told_snapshots": "reactor",
        "turns": "probes",
        "wants": "objects",
        "welcomed_at": "reactor",
    },
}

LEDGER = {"reserve": "memory", "release": "memory", "resize": "limits memory sleeping"}
"""Methods that change reserved device memory, with the files that call them."""


def found() -> dict[str, dict[str, str]]:
    writers: dict[str, dict[str, set[str]]] = {noun: defaultdict(set) for noun in WRITERS}
    for path in sorted(CORE.glob("*.py")):
        for field, owner, _ in written(ast.parse(path.read_text())):
            noun = owner.rpartition(".")[2]
            if noun in WRITERS and (noun, field) not in OUT_TRAY:
                writers[noun][field].add(path.stem)
    return {
        noun: {field: " ".join(sorted(files)) for field, files in sorted(fields.items())}
        for noun, fields in writers.items()
    }


@pytest.mark.parametrize("noun", WRITERS)
def test_each_field_is_written_only_in_the_listed_files(noun: str) -> None:
    assert found()[noun] == WRITERS[noun]


def test_calls_objects_and_leaving_have_one_writer_each() -> None:
    of_library, of_pilot = WRITERS["library"], WRITERS["state"]
    assert [of_library[field] for field in ("held", "waiting", "served")] == ["running"] * 3
    assert of_library["stage"] == "lifecycle"
    assert [of_pilot[field] for field in ("claims", "wants", "leaving")] == ["memory", "objects", "lifecycle"]


def test_device_memory_ledger_is_changed_only_by_listed_files() -> None:
    called = defaultdict(set)
    for path in CORE.glob("*.py"):
        for method in re.findall(r"ledger\.([a-z_]+)\(", path.read_text()):
            if path.stem != "state" and method in LEDGER:
                called[method].add(path.stem)
    assert {method: " ".join(sorted(files)) for method, files in called.items()} == LEDGER
