"""Keep records of failed nodes for all sessions of the user, in one file of the state folder.

If the file is unreadable, a session excludes only the nodes that fail during it.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from msgspec.structs import astuple, replace

from stoker.contexts.folders import state_folder
from stoker.contexts.performance import MeasurementFile
from stoker.errors import StokerError
from stoker.protocol.blocks import FORGET_NODE_S, NodeRecord

FILE = "nodes.sqlite"
CHECK_CHANGES_S = 10.0
_COLUMNS = ", ".join(NodeRecord.__struct_fields__)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS nodes (
    source TEXT NOT NULL, node TEXT NOT NULL, excluded INTEGER NOT NULL, why TEXT NOT NULL, since REAL NOT NULL,
    at REAL NOT NULL, heard_at REAL NOT NULL, probed_at REAL NOT NULL, said TEXT NOT NULL, probes INTEGER NOT NULL,
    probe_s REAL NOT NULL, PRIMARY KEY (source, node)
) WITHOUT ROWID;
"""
_SHAPE = f"SELECT {_COLUMNS} FROM nodes LIMIT 1"
_INSERT = f"""
INSERT INTO nodes ({_COLUMNS}) VALUES ({", ".join("?" * len(NodeRecord.__struct_fields__))})
ON CONFLICT (source, node) DO UPDATE SET
"""
_WRITE = f"""
{_INSERT} {", ".join(f"{name} = excluded.{name}" for name in NodeRecord.__struct_fields__[2:])}
WHERE excluded.at >= nodes.at
"""
_CLAIM = f"""
{_INSERT} probed_at = excluded.probed_at, at = excluded.at
WHERE nodes.excluded AND max(nodes.since, nodes.probed_at) + ? <= excluded.probed_at
"""


class NodeRecordStore:
    def __init__(self) -> None:
        self._file = MeasurementFile(_store_file(), schema=_SCHEMA, shape=_SHAPE)
        self._look_at = 0.0
        self._version: object = None

    @property
    def is_open(self) -> bool:
        return self._file.is_open

    def store_record(self, record: NodeRecord) -> bool:
        """Store a record, unless a newer one exists. Return False if the file cannot be written."""
        return self._file.write((_WRITE, [astuple(record)])) is not None

    def claim_probe(self, record: NodeRecord, *, every_s: float, now: float) -> bool:
        """Record a probe of an excluded node. Return False if another session probed the node within `every_s` or
        allowed it again."""
        row = astuple(replace(record, probed_at=now, at=now))
        changed = self._file.write((_CLAIM, [(*row, every_s)]))
        return changed is None or changed > 0

    def read_records(self) -> list[NodeRecord]:
        """Return all records with a report in the last `FORGET_NODE_S`, and remove the others."""
        since = time.time() - FORGET_NODE_S
        rows = self._file.read(f"SELECT {_COLUMNS} FROM nodes ORDER BY source, node")
        found = [NodeRecord(source, node, bool(excluded), *rest) for source, node, excluded, *rest in rows]
        if any(record.heard_at < since for record in found):
            self._file.write(("DELETE FROM nodes WHERE heard_at < ?", [(since,)]))
        return [record for record in found if record.heard_at >= since]

    def records_if_changed(self, now: float) -> list[NodeRecord]:
        """Return all records if another process may have written records since the last check, else none."""
        if now < self._look_at:
            return []
        self._look_at = now + CHECK_CHANGES_S
        version = self._file.read("PRAGMA data_version")
        if version == self._version:
            return []
        self._version = version
        return self.read_records()

    def close(self) -> None:
        self._file.close()


def allow_node_again(node: str) -> list[NodeRecord]:
    """Allow blocks on a node again, in all sessions. Return its earlier records, one per site that excluded it. Raises
    StokerError if the node is not excluded, or its records cannot be read or written."""
    there = excluded_nodes()
    found = [record for record in there if record.node == node]
    if not found:
        names = ", ".join(dict.fromkeys(record.node for record in there))
        raise StokerError(
            f"node {node} is not excluded; {f'excluded nodes: {names}' if names else 'no node is excluded'}"
        )
    with contextlib.closing(NodeRecordStore()) as store:
        for record in found:
            now = max(time.time(), record.at + 0.001)
            if not store.store_record(replace(record, excluded=False, why="cleared by hand", at=now, heard_at=now)):
                raise StokerError(f"node {node} is still excluded: {_store_file()} cannot be written; make room there")
    return found


def excluded_nodes() -> list[NodeRecord]:
    """Return the excluded nodes of all sites. Raises StokerError if the file is unreadable."""
    if not _store_file().exists():
        return []
    with contextlib.closing(NodeRecordStore()) as store:
        if not store.is_open:
            raise StokerError(
                f"{_store_file()} cannot be read: no session knows which nodes are excluded; move it away"
            )
        return [record for record in store.read_records() if record.excluded]


def _store_file() -> Path:
    return state_folder() / FILE
