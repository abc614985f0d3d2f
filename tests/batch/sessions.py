from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batch.lab.commands import until

from stoker.manager.executor.session import Session
from stoker.protocol.blocks import BlockStatus
from stoker.protocol.to_client import Status

# A command retries for four seconds before it reports that slurmctld does not answer.
DEFAULTS: dict[str, dict[str, Any]] = {
    "provider": {
        "kind": "slurm",
        "partition": "backfill",
        "cores": 1,
        "walltime": "10 min",
        "poll": "0.5 s",
        "command_limit": "20 s",
    },
    "pilot": {"devices": "cpu:1", "init_blocks": 1, "max_blocks": 1},
    "session": {"heartbeat": "1 s", "lease": "30 s", "interface": "127.0.0.1", "ports": "32100-32700"},
    "policy": {"provisioning": "fixed"},
}


def write_site(folder: Path, *, name: str = "lab", **sections: Mapping[str, Any]) -> Path:
    """Write a site file for one block of one core in `backfill`; `sections` overrides these settings."""
    lines = [f"name = {json.dumps(name)}"]
    for section in (*DEFAULTS, *(section for section in sections if section not in DEFAULTS)):
        lines.append(f"[{section}]")
        settings = {**DEFAULTS.get(section, {}), **sections.get(section, {})}
        lines += [f"{setting} = {json.dumps(value)}" for setting, value in settings.items()]
    path = folder / f"{name}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def status_when(session: Session, true: Any, *, what: str, limit_s: float = 80.0) -> Status:
    def found() -> Status | None:
        status = session.status(20)
        return status if true(status) else None

    status = until(found, limit_s=limit_s, what=what)
    assert status is not None
    return status


def block_when(session: Session, true: Any, *, what: str, limit_s: float = 80.0) -> BlockStatus:
    status = status_when(session, lambda status: any(map(true, status.jobs)), what=what, limit_s=limit_s)
    return next(block for block in status.jobs if true(block))
