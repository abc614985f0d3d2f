from __future__ import annotations

import datetime
import resource
from pathlib import Path

import pytest
from cli.command_line import Stoker
from msgspec.structs import replace

from stoker.config import parse_site
from stoker.contexts.folders import state_folder
from stoker.manager.cli import doctor, doctor_site
from stoker.manager.cli.doctor_machine import FindingLevel
from stoker.manager.cli.surroundings import HostFacts
from stoker.manager.live import node_store
from stoker.manager.live.node_store import NodeRecordStore
from stoker.protocol import show_status
from stoker.protocol.blocks import BlockPhase, BlockStatus, NodeRecord
from stoker.protocol.to_client import Status
from stoker.site import ProviderKind

AT = datetime.datetime.now().replace(hour=14, minute=2, second=0, microsecond=0).timestamp()
DAY = f"{datetime.datetime.fromtimestamp(AT):%Y-%m-%d}"
BAD = NodeRecord("gpu", "n2", True, "cuda:0 failed", since=AT, at=AT, heard_at=AT)
PROBED = replace(BAD, probed_at=AT + 3600, said="failed: cuda:0 failed", probes=2, probe_s=41.0)
STATUS = Status(
    session="k3v9", uptime_s=60.0, queued=0, running=0, done=0, failed=0, rate=0.0, left_s=0.0, pilots=(), libraries=(),
    contexts=(), blocks={}, lost_pilots=0, rerun_calls=0, refused={},
)  # fmt: skip


def keep(*records: NodeRecord) -> None:
    store = NodeRecordStore()
    for record in records:
        store.store_record(record)
    store.close()


def test_status_names_excluded_nodes_and_the_cost_of_probes():
    assert show_status.describe_excluded_node(BAD) == f"n2 of gpu since {DAY} 14:02: cuda:0 failed; not probed yet"
    shown = f"n2 of gpu since {DAY} 14:02: cuda:0 failed; 2 probes used the node for 41 s, the last at {DAY} 15:02"
    assert show_status.describe_excluded_node(PROBED) == f"{shown}: failed: cuda:0 failed"
    probe = BlockStatus("b7", "gpu", BlockPhase.PENDING.value, "88123", "Priority", 3.0, 0.0, (), probes="n2")
    lines = str(replace(STATUS, excluded_nodes=(PROBED,), jobs=(probe,))).splitlines()
    assert lines[2:] == [
        "  pilots    none",
        f"  excluded  {shown}: failed: cuda:0 failed; a probe is pending (job 88123)",
    ]


def test_doctor_lists_excluded_nodes_and_how_to_clear_them():
    [fine] = doctor.check_excluded_nodes()
    assert (fine.level, fine.text) == (FindingLevel.OK, "no node is excluded because its devices failed")
    assert not (state_folder() / node_store.FILE).exists()
    keep(PROBED, replace(BAD, node="n3", excluded=False))
    [bad] = doctor.check_excluded_nodes()
    assert bad.level is FindingLevel.WARN
    assert bad.text.startswith(f"no block starts on node n2 of gpu since {DAY} 14:02: cuda:0 failed; 2 probes used")
    assert "stoker doctor --clear n2" in bad.fix


def test_doctor_clears_an_excluded_node(stoker: Stoker):
    keep(BAD, replace(BAD, source="other"), replace(BAD, node="n3"))
    said = stoker.ok("doctor", "--clear", "n2").output
    assert said.splitlines() == [
        "blocks of site gpu may start on n2 again; running sessions notice the change within 10 s",
        "blocks of site other may start on n2 again; running sessions notice the change within 10 s",
    ]
    assert [record.node for record in node_store.excluded_nodes()] == ["n3"]
    again = stoker("doctor", "--clear", "n2")
    assert str(again.exception) == "node n2 is not excluded; excluded nodes: n3"
    stoker.ok("doctor", "--clear", "n3")
    assert str(stoker("doctor", "--clear", "n3").exception) == "node n3 is not excluded; no node is excluded"


def test_clear_reports_unreadable_records(stoker: Stoker):
    keep(BAD)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        refused = stoker("doctor", "--clear", "n2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(refused.exception).startswith(f"{state_folder() / node_store.FILE} cannot be read")
    assert [record.node for record in node_store.excluded_nodes()] == ["n2"]


def test_doctor_names_batch_systems_that_cannot_exclude_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    around = HostFacts("login1", "ana", ProviderKind.PBS, "qsub", others=(ProviderKind.SLURM,))
    monkeypatch.setattr(doctor_site, "inspect_host", lambda: around)

    def said(kind: str) -> str:
        site = parse_site(f'name = "lab"\n[provider]\nkind = "{kind}"\n', file="lab.toml")
        return "\n".join(finding.text for finding in doctor_site.check_site_file(site))

    assert "site lab: Stoker excludes no failed nodes for PBS jobs: a new block may start on" in said("pbs")
    assert "excludes no failed nodes" not in said("slurm")
