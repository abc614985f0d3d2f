"""Format the records of excluded nodes as text, for `stoker status` and `stoker doctor`."""

from __future__ import annotations

import datetime

from stoker.protocol.blocks import NodeRecord
from stoker.protocol.status import SessionFacts
from stoker.units import show_seconds


def excluded_nodes(status: SessionFacts) -> list[str]:
    """Return one line of text per excluded node, with the state of the node's queued or running probe."""
    probes = {(job.source, job.probes): job for job in status.jobs if job.probes}
    lines = []
    for record in status.excluded_nodes:
        job = probes.get((record.source, record.node))
        name = f" (job {job.job})" if job is not None and job.job else ""
        lines.append(describe_excluded_node(record) + (f"; a probe is {job.phase}{name}" if job is not None else ""))
    return lines


def describe_excluded_node(record: NodeRecord) -> str:
    """Return `n2 of gpu since 2026-11-29 14:02: it failed; 2 probes used 41 s of it, the last at 2026-11-29 15:02`."""
    text = f"{record.node} of {record.source} since {_format_minute(record.since)}: {record.why}"
    if record.probed_at <= record.since:
        return f"{text}; not probed yet"
    if record.probes:
        many = "1 probe" if record.probes == 1 else f"{record.probes} probes"
        text += f"; {many} used {show_seconds(record.probe_s)} of it"
    last = f"the last at {_format_minute(record.probed_at)}"
    return ": ".join(filter(None, (f"{text}, {last}", record.said)))


def _format_minute(at: float) -> str:
    return f"{datetime.datetime.fromtimestamp(at):%Y-%m-%d %H:%M}"
