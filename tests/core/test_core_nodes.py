from __future__ import annotations

from typing import Any

import msgspec
import pytest
from core.builders import Cluster, Make, devices

from stoker.manager.core.events import ClaimProbe, NodesHeard, ProbeClaimed, RecordNode, RecordStay, SessionDefined
from stoker.manager.core.nodes import NEXT_CHECK_S
from stoker.manager.core.nouns import PilotState
from stoker.manager.core.seams import Quarantine
from stoker.protocol import to_client, to_pilot
from stoker.protocol import to_manager as say
from stoker.protocol.blocks import (
    FORGET_NODE_S,
    AllowedNodes,
    BlockOrder,
    BlockPhase,
    KnownBlock,
    NodeRecord,
    ProvisioningRule,
    Source,
)
from stoker.protocol.ids import BlockId

EVERY_S = 100.0
GPU = Source(
    "gpu",
    ProvisioningRule.OPPORTUNISTIC,
    first=0,
    most=6,
    keep_pending=1,
    idle_s=1e6,
    exclude_nodes=2,
    probe_nodes_s=EVERY_S,
)
BAD = "cuda:0 gave a wrong matrix product, twice"


def joined(c: Cluster, name: str, *, node: str, block: str, faults: tuple[str, ...] = ("",), kind: str = "a10") -> None:
    of = tuple(
        msgspec.structs.replace(d, fault=f) for d, f in zip(devices(len(faults), kind=kind), faults, strict=True)
    )
    c.block(block, phase=BlockPhase.RUNNING)
    c.hello(name, devices=of, block=block, node=node)


def records(c: Cluster) -> list[NodeRecord]:
    return [each.record for each in c.commands(RecordNode)]


def cluster_with_bad_node(cluster: Make, source: Source = GPU, **how: Any) -> Cluster:
    c = cluster().sources(source)
    c.call("c1")
    assert [order.allowed for order in c.block_orders()] == [AllowedNodes()]
    joined(c, "p1", node="n2", block="b1", faults=(BAD,), **how)
    return c


def test_block_leaves_a_faulty_node_and_later_blocks_avoid_the_node(cluster: Make) -> None:
    c = cluster_with_bad_node(cluster)
    assert c.pilot().state is PilotState.DRAINING
    assert [order.allowed for order in c.block_orders()] == [AllowedNodes(exclude=("n2",))]
    [record] = c.status().excluded_nodes
    assert (record.source, record.node, record.why, record.since) == ("gpu", "n2", BAD, c.now)
    assert f"gpu: no new block starts on n2: {BAD}" in c.core.state.notices
    assert records(c) == [record]
    assert "its node n2 is excluded" in c.story("b1")


def test_quarantine_of_a_policy_excludes_the_node(cluster: Make) -> None:
    c = cluster().sources(GPU)
    c.call("c1")
    joined(c, "p1", node="n2", block="b1")
    c.by_hand = True
    c.apply([Quarantine(c.pilot().id, None, "its disk failed", 600.0)], seam="residency")
    assert [(each.node, each.why) for each in c.status().excluded_nodes] == [("n2", "its disk failed")]


@pytest.mark.parametrize("faults", [("", BAD), ("", "", BAD, BAD)])
def test_node_with_one_working_device_is_not_excluded(cluster: Make, faults: tuple[str, ...]) -> None:
    c = cluster().sources(GPU)
    c.call("c1")
    joined(c, "p1", node="n2", block="b1", faults=faults)
    assert not c.status().excluded_nodes
    assert c.pilot().state is PilotState.HERE


@pytest.mark.parametrize(
    ("source", "node"),
    [
        (msgspec.structs.replace(GPU, exclude_nodes=0), "n2"),
        (GPU, ""),
        (GPU, "n2\n#SBATCH --uid=0"),
    ],
)
def test_no_node_is_excluded_without_permission_or_a_valid_name(cluster: Make, source: Source, node: str) -> None:
    c = cluster().sources(source)
    c.call("c1")
    joined(c, "p1", node=node, block="b1", faults=(BAD,))
    assert not c.status().excluded_nodes
    assert not records(c)


def test_no_more_nodes_are_excluded_than_the_site_allows(cluster: Make) -> None:
    c = cluster_with_bad_node(cluster)
    for number in (3, 4):
        c.call(f"c{number}").wait(1.0)
        joined(c, f"p{number}", node=f"n{number}", block=f"b{number - 1}", faults=(BAD,))
    assert [each.node for each in c.status().excluded_nodes] == ["n2", "n3"]
    said = "gpu: blocks may start on n4, although it failed: 2 nodes, the maximum, are excluded"
    assert said in c.core.state.notices
    assert not c.core.state.blocks[BlockId("b3")].release_reason  # the next block could start on n4 too


# ---- probes


def begin_probe(c: Cluster, seconds: float = EVERY_S) -> BlockOrder:
    """Wait until a probe of n2 is due, and consent to it. Return its order."""
    c.block_orders()
    c.others.clear()
    c.wait(seconds)
    [claim] = c.commands(ClaimProbe)
    assert (claim.record.node, claim.every_s) == ("n2", EVERY_S)
    c.event(ProbeClaimed("gpu", "n2"))
    [order] = c.block_orders()
    assert order.allowed == AllowedNodes(only="n2")
    return order


def test_probe_without_a_fault_ends_the_exclusion_of_the_node(cluster: Make) -> None:
    c = cluster_with_bad_node(cluster)
    order = begin_probe(c)
    source = c.core.state.sources["gpu"]
    before = dict(source.blocks)
    assert order.block not in source.blocks
    assert [job.probes for job in c.status().jobs if job.block == order.block] == ["n2"]
    c.call("c2")
    joined(c, "p9", node="n2", block=order.block)
    assert c.pilot("p9").state is PilotState.DRAINING
    assert not c.pilot("p9").libraries
    told = list(c.mail["p9"])
    assert [message.reason for message in told if isinstance(message, to_pilot.Exit)]
    assert not c.status().excluded_nodes
    assert "gpu: blocks may start on n2 again: a probe there found no fault" in c.core.state.notices
    c.wait(20.0).report("p9", say.PilotLeaving("drained"))
    c.block(order.block, phase=BlockPhase.ENDED, reason="cancelled")
    record = records(c)[-1]
    assert (record.excluded, record.said, record.probes, record.probe_s) == (False, "no fault", 1, 20.0)
    assert before.keys() <= source.blocks.keys()
    assert not any(isinstance(each, RecordStay) for each in c.others)  # the stay of a probe's pilot is not recorded
    assert all(not order.allowed.exclude for order in c.block_orders())


def test_probe_that_fails_keeps_the_node_excluded(cluster: Make) -> None:
    c = cluster_with_bad_node(cluster)
    order = begin_probe(c)
    joined(c, "p9", node="n2", block=order.block, faults=("cuda:0 failed",))
    c.report("p9", say.PilotLeaving("drained"))
    c.block(order.block, phase=BlockPhase.ENDED, reason="cancelled")
    [record] = c.status().excluded_nodes
    assert (record.why, record.said, record.heard_at) == (BAD, "failed: cuda:0 failed", c.now)
    assert c.core.state.sources["gpu"].failures == 0
    assert begin_probe(c).block != order.block


def test_probe_without_an_answer_is_repeated(cluster: Make) -> None:
    c = cluster_with_bad_node(cluster)
    order = begin_probe(c)
    c.block(order.block, phase=BlockPhase.PENDING, reason="ReqNodeNotAvail", no_node=True)
    c.wait(2 * EVERY_S)  # at most one probe of a node exists
    assert not [each for each in c.block_orders() if each.allowed.only]
    c.block(order.block, phase=BlockPhase.RUNNING).wait(60.0)
    c.block(order.block, phase=BlockPhase.ENDED, reason="out of walltime")
    [record] = c.status().excluded_nodes
    assert (record.said, record.probes, record.probe_s) == ("no answer: out of walltime", 1, 60.0)
    assert c.core.state.sources["gpu"].failures == 0
    assert "out of walltime" not in c.status().ended_blocks
    begin_probe(c, NEXT_CHECK_S)  # the probe is overdue, but another session may have begun one


def test_node_unknown_to_the_batch_system_is_forgotten(cluster: Make) -> None:
    c = cluster_with_bad_node(cluster)
    order = begin_probe(c)
    c.block(order.block, phase=BlockPhase.REFUSED, reason="Invalid node name specified", no_node=True)
    assert not c.status().excluded_nodes


def test_recent_probe_by_another_session_delays_a_probe(cluster: Make) -> None:
    c = cluster_with_bad_node(cluster)
    c.wait(EVERY_S - 5.0)
    [record] = c.status().excluded_nodes
    c.event(NodesHeard((msgspec.structs.replace(record, at=c.now, probed_at=c.now),)))
    c.others.clear()
    c.wait(EVERY_S - 10.0)
    assert not c.commands(ClaimProbe)
    c.wait(20.0)
    assert c.commands(ClaimProbe)


def test_new_factory_receives_the_excluded_nodes(cluster: Make) -> None:
    c = cluster_with_bad_node(cluster)
    probe = begin_probe(c)
    c.client_hello("another", factory=True)
    known = {each.block: each for each in c.hears("another", to_client.KnownBlocks).blocks}
    assert known[probe.block] == KnownBlock(probe.block, "gpu", BlockPhase.ASKED, allowed=AllowedNodes(only="n2"))
    assert AllowedNodes(exclude=("n2",)) in [each.allowed for each in known.values()]


# ---- several sessions


def test_probe_is_cancelled_if_another_session_clears_the_node(cluster: Make) -> None:
    c = cluster_with_bad_node(cluster)
    order = begin_probe(c)
    [record] = c.status().excluded_nodes
    c.event(NodesHeard((msgspec.structs.replace(record, excluded=False, at=c.now + 1.0),)))
    [cancelled] = [each for each in c.mail["factory"] if isinstance(each, to_client.CancelBlocks)]
    assert cancelled.blocks == (order.block,)


def test_node_without_reports_for_a_week_is_forgotten(cluster: Make) -> None:
    c = cluster()
    c.event(NodesHeard((NodeRecord("gpu", "n2", True, BAD, since=c.now, at=c.now, heard_at=c.now),)))
    c.sources(GPU).wait(FORGET_NODE_S + 1.0)
    c.call("c1")
    assert [order.allowed for order in c.block_orders()] == [AllowedNodes()]
    c.event(SessionDefined((GPU,)))
    assert not c.core.state.nodes


# ---- no node is left


@pytest.mark.parametrize("phase", [BlockPhase.PENDING, BlockPhase.REFUSED])
def test_exclusion_ends_if_no_other_node_is_left(cluster: Make, phase: BlockPhase) -> None:
    c = cluster_with_bad_node(cluster)
    [order] = c.block_orders()
    why = "ReqNodeNotAvail, UnavailableNodes:n1"
    c.block(order.block, phase=phase, reason=why, no_node=True)
    assert not c.status().excluded_nodes
    assert c.core.state.sources["gpu"].failures == 0
    [notice] = [text for text in c.core.state.notices if "no other node" in text]
    assert notice.startswith("gpu: blocks may start on n2 again, although devices there failed: the batch system has")
    assert why in notice
    [again] = c.block_orders()
    assert again.allowed == AllowedNodes()
    joined(c, "p2", node="n2", block=again.block, faults=(BAD,))
    assert not c.status().excluded_nodes  # an excluded node would end the new block at once
    assert not c.core.state.blocks[again.block].release_reason
    c.wait(EVERY_S)
    c.report("p2", say.DeviceFault("cuda:0", "it failed again"))
    assert [each.node for each in c.status().excluded_nodes] == ["n2"]


def test_node_exclusion_ends_when_its_device_works_again(cluster: Make) -> None:
    once = msgspec.structs.replace(GPU, rule=ProvisioningRule.ONCE, first=1, most=1)
    c = cluster().sources(once)
    joined(c, "p1", node="n2", block="b1", faults=("",))
    c.report("p1", say.DeviceFault("cuda:0", BAD))
    assert c.status().excluded_nodes
    assert c.pilot().state is PilotState.HERE  # the pilot stays, because no block would replace it
    c.report("p1", say.DeviceFault("cuda:0", ""))
    assert not c.status().excluded_nodes


def test_overdue_probe_starts_with_the_first_pilot(cluster: Make) -> None:
    c = cluster().wait(1000.0)
    at = c.now - 2 * EVERY_S
    c.event(NodesHeard((NodeRecord("gpu", "n2", True, BAD, since=at, at=at, heard_at=at),)))
    c.sources(GPU)
    assert not c.commands(ClaimProbe)  # nothing needs the source yet
    c.call("c1")
    joined(c, "p1", node="n3", block="b1")
    [claim] = c.commands(ClaimProbe)
    assert claim.record.node == "n2"
