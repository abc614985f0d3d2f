"""Exclude nodes with failed devices from new blocks until a test of the node finds no fault.

If all devices of one kind of a pilot are quarantined, its node is excluded and its block is released. Every
`probe_nodes_s` seconds, one session starts a one-minute block that only tests the devices of the node (a *probe*). The
node is excluded until a probe finds no fault, an operator allows it, or no report about it arrives for `FORGET_NODE_S`
seconds. If the batch system has no other node for a block, the source excludes no node for `probe_nodes_s` seconds.
Sessions exchange their records of nodes (`NodesHeard`), and use the newer record of a node.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stoker.manager.core import block_orders
from stoker.manager.core.events import ClaimProbe, ProbeClaimed, RecordNode
from stoker.manager.core.manager import Manager
from stoker.manager.core.nouns import Device, Pilot
from stoker.manager.core.state import Block, SourceState, State
from stoker.protocol.blocks import FORGET_NODE_S, BlockPhase, NodeRecord, ProvisioningRule, is_node_name
from stoker.protocol.ids import BlockId
from stoker.protocol.to_manager import BlockUpdate
from stoker.units import show_seconds

NODES_TIMER = "nodes"
NEXT_CHECK_S = 600.0  # Seconds until the next check if a probe is due but there are no calls or blocks


# ---- faults of pilots
def exclude_node_if_devices_failed(manager: Manager, pilot: Pilot) -> None:
    state = manager.state
    source, why = state.sources.get(pilot.source), describe_failed_device_kind(pilot)
    if source is None or not source.source.exclude_nodes or not is_node_name(pilot.node) or not why:
        return
    if not _is_excluded(state, source, pilot.node):
        _exclude_node(manager, source, pilot.node, why)
    block = state.blocks.get(BlockId(pilot.block))
    if (
        block is None
        or block.joined_pilots < block.source.source.nodes
        or block.source.source.rule is ProvisioningRule.ONCE
    ):
        return
    if _is_excluded(state, source, pilot.node) and all(
        describe_failed_device_kind(state.pilots[id]) for id in block.pilots
    ):
        block_orders.release_block(manager, block, f"its node {pilot.node} is excluded: {why}")


def check_devices_after_test(manager: Manager, pilot: Pilot) -> None:
    """Exclude the node of a pilot whose devices failed, or allow it again if all devices work."""
    exclude_node_if_devices_failed(manager, pilot)
    known = manager.state.nodes.get((pilot.source, pilot.node))
    if known is not None and known.excluded and not any(device.fault for device in pilot.devices.values()):
        _allow_node(manager, known, "its devices work again")
        check_nodes_of_source(manager, pilot.source)


def describe_failed_device_kind(pilot: Pilot) -> str:
    """Return the fault of a device kind of which all devices of the pilot failed; empty if there is no such kind."""
    of_kind: dict[str, list[Device]] = {}
    for device in pilot.devices.values():
        of_kind.setdefault(device.facts.kind, []).append(device)
    return next((same[0].fault for same in of_kind.values() if all(device.fault for device in same)), "")


def _exclude_node(manager: Manager, source: SourceState, node: str, why: str) -> None:
    state, now, name = manager.state, manager.state.now, source.source.name
    if now < source.exclusions_paused_until:
        return
    if len(state.excluded_nodes(source)) >= source.source.exclude_nodes:
        most = source.source.exclude_nodes
        state.add_notice(
            f"{name}: blocks may start on {node}, although it failed: {most} nodes, the maximum, are excluded"
        )
        return
    before = state.nodes.get((name, node))
    probes, probe_s = (before.probes, before.probe_s) if before is not None else (0, 0.0)
    _store_record(
        manager, NodeRecord(name, node, True, why, since=now, at=now, heard_at=now, probes=probes, probe_s=probe_s)
    )
    state.add_notice(f"{name}: no new block starts on {node}: {why}")
    check_nodes_of_source(manager, name)


def _is_excluded(state: State, source: SourceState, node: str) -> bool:
    return any(record.node == node for record in state.excluded_nodes(source))


def _allow_node(manager: Manager, record: NodeRecord, why: str) -> None:
    _store_record(manager, msgspec.structs.replace(record, excluded=False, why=why, heard_at=manager.state.now))
    manager.state.add_notice(f"{record.source}: blocks may start on {record.node} again: {why}")


def _store_record(manager: Manager, record: NodeRecord) -> None:
    record = msgspec.structs.replace(record, at=manager.state.now)
    manager.state.nodes[record.source, record.node] = record
    manager.commands.append(RecordNode(record))


# ---- other sessions
def adopt_newer_records(manager: Manager, records: Iterable[NodeRecord]) -> None:
    state = manager.state
    for record in records:
        known = state.nodes.get((record.source, record.node))
        if known is None or record.at > known.at:
            state.nodes[record.source, record.node] = record
    check_nodes_of_all_sources(manager)


def check_nodes_of_all_sources(manager: Manager) -> None:
    for name in manager.state.sources:
        check_nodes_of_source(manager, name)


# ---- probes
def check_nodes_of_source(manager: Manager, name: str) -> None:
    """Forget old records of a source's nodes, end unnecessary probes, request due probes, and set the next timer."""
    state, now = manager.state, manager.state.now
    source = state.sources.get(name)
    if source is None or state.end_reason or not state.nodes:
        return
    old = [key for key, record in state.nodes.items() if key[0] == name and now - record.heard_at >= FORGET_NODE_S]
    for key in old:
        del state.nodes[key]
    excluded = {record.node: record for record in state.excluded_nodes(source)}
    probes = [block for block in state.blocks.values() if block.source is source and block.probed_node]
    for block in probes:
        if block.probed_node not in excluded:
            block_orders.release_block(manager, block, f"node {block.probed_node} is no longer excluded")
    probed, next_at = {block.probed_node for block in probes}, []
    for node, record in excluded.items():
        if node in probed:
            continue
        at = max(record.since, record.probed_at) + source.source.probe_nodes_s
        if at <= now and (source.blocks or state.calls):
            manager.commands.append(ClaimProbe(record, source.source.probe_nodes_s))
        next_at.append(at if at > now else now + NEXT_CHECK_S)
    if next_at:
        manager.set_timer(f"{NODES_TIMER}/{name}", min(next_at))


def request_probe_block(manager: Manager, event: ProbeClaimed) -> None:
    state = manager.state
    source, record = state.sources.get(event.source), state.nodes.get((event.source, event.node))
    if source is not None and record is not None and _is_excluded(state, source, event.node):
        _store_record(manager, msgspec.structs.replace(record, probed_at=state.now))
        block_orders.request_blocks(manager, source, 1, probed=event.node)


def check_devices_at_hello(manager: Manager, pilot: Pilot) -> None:
    """Exclude the node of a pilot whose devices failed. If the pilot was a probe, record its result and release it."""
    block = manager.state.blocks.get(BlockId(pilot.block))
    if block is None or not block.probed_node:
        exclude_node_if_devices_failed(manager, pilot)
        # check now: a probe is requested only while the source is in use
        check_nodes_of_source(manager, pilot.source)
    elif not block.release_reason:
        _record_probe_result(manager, block, pilot)
        block_orders.release_block(manager, block, f"its pilot tested node {block.probed_node}")


def _record_probe_result(manager: Manager, block: Block, pilot: Pilot) -> None:
    record = _record_of_probed_node(manager.state, block)
    if record is None or pilot.node != block.probed_node:
        return
    if fault := describe_failed_device_kind(pilot) or pilot.lacks:
        _store_record(manager, msgspec.structs.replace(record, said=f"failed: {fault}", heard_at=manager.state.now))
    else:
        _allow_node(manager, msgspec.structs.replace(record, said="no fault"), "a probe there found no fault")


def record_ended_probe(manager: Manager, block: Block | None, message: BlockUpdate) -> None:
    """Record how long an ended probe ran. If its pilot never joined, record the reason."""
    record = _record_of_probed_node(manager.state, block) if block is not None and block.phase.is_over else None
    if block is None or record is None:
        return
    took_s = manager.state.now - block.runs_since if block.runs_since else 0.0
    said = record.said if block.joined_pilots else f"no answer: {message.reason or 'its job ended'}"
    record = msgspec.structs.replace(record, probes=record.probes + 1, probe_s=record.probe_s + took_s, said=said)
    if record.excluded and message.no_node and message.phase is BlockPhase.REFUSED:
        _allow_node(manager, record, "the batch system has no such node for the site's jobs")
    else:
        _store_record(manager, record)
    check_nodes_of_source(manager, record.source)


def _record_of_probed_node(state: State, block: Block) -> NodeRecord | None:
    return state.nodes.get((block.source.source.name, block.probed_node)) if block.probed_node else None


# ---- no node is left
def allow_nodes_if_none_left(manager: Manager, message: BlockUpdate) -> None:
    """If no node is left for a block, allow the excluded nodes of its source again, and replace the waiting blocks."""
    state = manager.state
    block = state.blocks.get(message.block)
    if block is None or not message.no_node or not block.allowed.exclude or block.release_reason:
        return
    source = block.source
    source.exclusions_paused_until = state.now + source.source.probe_nodes_s
    records = state.excluded_nodes(source)
    for record in records:
        why = f"no other node was left ({message.reason})"
        _store_record(manager, msgspec.structs.replace(record, excluded=False, why=why))
    nodes = ", ".join(record.node for record in records) or ", ".join(block.allowed.exclude)
    state.add_notice(
        f"{source.source.name}: blocks may start on {nodes} again, although devices there failed: the batch system has"
        f" no other node ({message.reason}); nodes are excluded again in {show_seconds(source.source.probe_nodes_s)}"
    )
    for other in [source.blocks[id] for id in source.coming_blocks]:
        if other.allowed.exclude and other.phase is not BlockPhase.RUNNING:
            block_orders.release_block(manager, other, "the block excludes nodes, and no other node is left")
    manager.demand_changed = True
