from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from batch.lab.commands import until


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
