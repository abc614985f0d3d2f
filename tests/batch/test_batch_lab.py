from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from batch.lab import texts
from batch.lab.commands import OVER, until
from batch.lab.shape import Preempt, Shape


def test_cancelled_preempted_job_has_ended(make_cluster, tmp_path):
    cluster = make_cluster(Shape(gpus=("a10:2", ""), preempt=Preempt.CANCEL, namespaces=True))
    out = tmp_path / "out"
    job = cluster.submit(
        "hostname; echo $CUDA_VISIBLE_DEVICES; bash -c 'exec 3<>/dev/tcp/10.77.0.1/$PORT' && echo reached; sleep 100",
        "--gres=gpu:a10:2",
        f"--output={out}",
        f"--export=ALL,PORT={texts.port(cluster.place, 'slurmctld')}",
    )
    until(lambda: out.exists() and "reached" in out.read_text(), what="the head from n1")
    assert out.read_text().split() == ["n1", "0,1", "reached"]
    high = cluster.submit("sleep 100", "--partition=main", "--gres=gpu:a10:2")
    assert cluster.wait(job, *OVER)["JobState"] == "PREEMPTED"
    cluster.wait(high, "RUNNING")
    assert _reaches_the_head(cluster, "n2")
    cluster.cut("n2")
    assert not _reaches_the_head(cluster, "n2")
    cluster.heal("n2")
    until(lambda: _reaches_the_head(cluster, "n2"), what="the head from n2 again")


def _reaches_the_head(cluster, node: str) -> bool:
    connect = f"exec 3<>/dev/tcp/{cluster.shape.address('head')}/{texts.port(cluster.place, 'slurmctld')}"
    command = cluster.machines[node].inside("timeout", "2", "bash", "-c", connect)
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_cluster_of_a_killed_test_leaves_no_process(shared_cluster, tmp_path):
    program = (
        "import sys, time\n"
        "from batch.lab.cluster import Cluster\n"
        "from batch.lab.shape import Shape\n"
        "with Cluster(Shape(gpus=('a10:1',))) as cluster:\n"
        "    job = cluster.submit('setsid sleep 1000 & sleep 1000')\n"
        "    cluster.wait(job, 'RUNNING')\n"
        "    print(cluster.place.root, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    tests = Path(__file__).resolve().parents[1]
    maker = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(tests)}
    )
    assert maker.stdout is not None
    folder = maker.stdout.readline().strip()
    assert folder, "the cluster came up"
    assert len(_of(folder)) >= 5, "munged, slurmctld, slurmd, and processes of the job"
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    maker.stdout.close()
    until(lambda: not Path(folder).exists(), what="the folder to go")
    until(lambda: _of(folder) == [], what="the shell that removed the folder to end, after everything else")


def _of(folder: str) -> list[int]:
    mark = f"SLURM_CONF={folder}/etc/slurm.conf\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found
