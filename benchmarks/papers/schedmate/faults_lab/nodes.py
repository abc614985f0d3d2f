"""Three pilots of one machine, as apart as on three nodes: each with a disk, a memory and a GPU of its own.

The disk is a tmpfs (`TMPDIR`), the memory a cgroup (version 1) with a limit; the GPU is the stand-in for NVIDIA's
driver of tests/driver. The commands that make them stand in the site file's `worker_init`, so that a pilot starts
inside. Root alone can do that.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
CGROUPS = Path("/sys/fs/cgroup/memory")
DISK_MB, MEMORY_MB, DEVICE_BYTES = 32, 1800, 24 * 10**9
PROBE = """
import os, sys, time
try:
    sick_until = float(open(os.environ["FAULTS_NODE"] + "/sick").read())
except OSError:
    sick_until = 0.0
if time.time() < sick_until:
    print("the device does not answer")
    sys.exit(5)
"""
"""The probe of a device whose node says until when it is sick."""
_INIT = """
node=$(mktemp -d {folder}/nodes/n-XXXXXX)
mkdir $node/tmp $node/use.d
mount -t tmpfs -o size={disk}m stoker-faults $node/tmp
mkdir {group}/$(basename $node)
echo {memory} > {group}/$(basename $node)/memory.limit_in_bytes
echo $$ > {group}/$(basename $node)/cgroup.procs
printf '{{"gpus": [{{"uuid": "GPU-%s", "memory": {device}}}]}}' $(basename $node) > $node/nvml.json
export STANDIN_NVML=$node/nvml.json FAULTS_NODE=$node FAULTS_GROUP={group}/$(basename $node) TMPDIR=$node/tmp
export FAULTS_REQUESTS={folder}/requests
export GLOO_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1
"""


class Nodes:
    """Makes the folders of a run, and clears away what its pilots made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.group = CGROUPS / f"stoker-faults-{os.getpid()}"

    def __enter__(self) -> Nodes:
        for name in ("nodes", "requests", "ran", "data", "scratch", "quota"):
            (self.folder / name).mkdir()
        self.group.mkdir()
        self._mount(self.folder / "quota", size_mb=1)
        with contextlib.suppress(OSError), open(self.folder / "quota" / "full", "wb", 0) as file:
            while True:
                file.write(bytes(4096))
        (self.folder / "probe.py").write_text(PROBE)
        return self

    def __exit__(self, *_: object) -> None:
        for place in [self.folder / "quota", *(self.folder / "nodes").glob("*/tmp")]:
            subprocess.run(["umount", "-l", str(place)], check=False)
        for group in [*self.group.glob("n-*"), self.group]:
            with contextlib.suppress(OSError):
                group.rmdir()

    def _mount(self, place: Path, *, size_mb: int) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "stoker-faults", str(place)], check=True)

    @property
    def worker_init(self) -> str:
        return _INIT.format(
            folder=self.folder,
            group=self.group,
            disk=DISK_MB,
            memory=MEMORY_MB << 20,
            device=DEVICE_BYTES,
        )

    @property
    def probe(self) -> str:
        return f"{sys.executable} -S {self.folder / 'probe.py'}"


def why_not() -> str:
    if os.geteuid() != 0:
        return "only root may mount a small disk and make a cgroup"
    if not (CGROUPS / "memory.limit_in_bytes").exists():
        return "there is no memory cgroup of version 1"
    try:
        subprocess.run(["strace", "-V"], capture_output=True, check=True)
    except OSError:
        return "strace is missing"
    return ""
