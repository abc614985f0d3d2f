"""ElasticFlow's plan on its own traces, against what its authors published (plot_figure/scripts of their artifact).

Published shares of jobs that end in time: Philly on 256 GPUs, simulated: 0.87 (Figure 8b). 195 jobs on 128 A100, on
their testbed: 0.667, and 0.087 for earliest deadline first (Figure 6b). On such traces the parts alone (Figure 9, 128
GPUs): 0.118 earliest deadline first, 0.326 that with admission, 0.835 shares without it, 0.949 all of it.

Ours is better than the published ones where nothing is rounded to their slots and nothing fails as on a testbed. Their
earliest deadline first gives a job 64 GPUs even where 16 are faster; ours does not, so it is better too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.baselines.elastic_flow_traces import earliest_deadline, elastic_flow, in_time, read, shares_alone

FOLDER = Path(os.environ.get("STOKER_TRACES", ""), "elasticflow")

pytestmark = pytest.mark.skipif(
    not (FOLDER / "throughput").is_dir(),
    reason="STOKER_TRACES names no folder with elasticflow/ in it (github.com/microsoft/elasticflow-traces)",
)


def test_the_philly_trace_is_at_least_as_good_as_published() -> None:
    tasks = read(FOLDER, "philly_103959.csv")
    alone = sum(any(t.submitted_at + s * t.iterations <= t.deadline_at for _, s in t.curve) for t in tasks) / len(tasks)
    assert 0.87 <= in_time(tasks, 256, elastic_flow, admission=True, slot_s=60.0) <= alone


def test_the_parts_of_the_plan_rank_as_published() -> None:
    tasks = read(FOLDER, "sim/195job.csv")
    by_deadline = in_time(tasks, 128, earliest_deadline, admission=False, slot_s=240.0)
    unguarded = in_time(tasks, 128, elastic_flow, admission=False, slot_s=240.0)
    lazy = in_time(tasks, 128, shares_alone, admission=True, slot_s=240.0)
    whole = in_time(tasks, 128, elastic_flow, admission=True, slot_s=240.0)
    assert by_deadline < 0.35
    assert by_deadline < unguarded < whole
    assert lazy <= whole
    assert whole >= 0.667
