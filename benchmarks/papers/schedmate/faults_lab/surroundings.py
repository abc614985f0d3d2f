"""Isolate three pilots on one machine like on three nodes, and cause faults on these nodes. Requires root.

`nodes`: each pilot has a tmpfs as disk, a cgroup (version 1) for memory, and the stand-in GPU of tests/driver.
`neighbours`: processes that use memory on request. `failing_file`: strace makes system calls on one file fail.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]
CGROUPS = Path("/sys/fs/cgroup/memory")
DISK_MB, MEMORY_MB, DEVICE_BYTES = 32, 1800, 24 * 10**9
PROGRAMS: dict[str, str] = tomllib.loads(Path(__file__).with_name("programs.toml").read_text())


@contextmanager
def nodes(folder: Path) -> Iterator[tuple[str, str]]:
    """Prepare a folder for three isolated pilots. Yield their `worker_init` and `probe`."""
    group = CGROUPS / f"stoker-faults-{os.getpid()}"
    for name in ("nodes", "requests", "ran", "data", "scratch", "quota"):
        (folder / name).mkdir()
    group.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "stoker-faults", str(folder / "quota")]
    subprocess.run(mount, check=True)
    try:
        with contextlib.suppress(OSError), open(folder / "quota" / "full", "wb", 0) as file:
            while True:
                file.write(bytes(4096))
        (folder / "probe.py").write_text(PROGRAMS["probe"])
        worker_init = PROGRAMS["worker_init"].format(
            folder=folder, group=group, disk=DISK_MB, memory=MEMORY_MB << 20, device=DEVICE_BYTES
        )
        yield worker_init, f"{sys.executable} -S {folder / 'probe.py'}"
    finally:
        for place in [folder / "quota", *(folder / "nodes").glob("*/tmp")]:
            subprocess.run(["umount", "-l", str(place)], check=False)
        for each in [*group.glob("n-*"), group]:
            with contextlib.suppress(OSError):
                each.rmdir()


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


LIMIT_S = 60.0
EVERY_S = 0.01

_WAITS = "print('ready', flush=True)\nsys.stdin.read()\n"


def _request_file() -> Path:
    return Path(os.environ["FAULTS_REQUESTS"], f"{Path(os.environ['FAULTS_NODE']).name}.json")


def request_neighbour(kind: str, *arguments: object) -> None:
    file = _request_file()
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps([kind, *map(str, arguments)]))
    draft.rename(file)
    _wait_for_file(file.with_suffix(".ready"), there=True)


def dismiss_neighbour() -> None:
    file = _request_file()
    file.unlink(missing_ok=True)
    _wait_for_file(file.with_suffix(".ready"), there=False)


def _wait_for_file(file: Path, *, there: bool) -> None:
    until = time.monotonic() + LIMIT_S
    while file.exists() is not there:
        if time.monotonic() > until:
            raise SystemExit(f"{file} did not {'come' if there else 'go'} within {LIMIT_S:g} s")
        time.sleep(EVERY_S)


@contextmanager
def neighbours(requests: Path) -> Iterator[list[str]]:
    """Start the processes that pilots request, and end the processes that pilots dismiss. Yield the list of started
    kinds.
    """
    here: dict[Path, subprocess.Popen[bytes]] = {}
    started, ends = list[str](), threading.Event()

    def begin(file: Path) -> None:
        kind, *arguments = json.loads(file.read_text())
        command = [sys.executable, "-S", "-c", PROGRAMS[kind] + _WAITS, *arguments]
        path = {"PATH": os.environ["PATH"]}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=path)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise SystemExit(f"the neighbour {kind} could not begin")
        here[file] = process
        started.append(kind)
        file.with_suffix(".ready").touch()

    def end(file: Path) -> None:
        here.pop(file).communicate()
        file.with_suffix(".ready").unlink(missing_ok=True)

    def serve() -> None:
        while not ends.wait(EVERY_S):
            for file in [file for file in here if not file.exists()]:
                end(file)
            for file in set(requests.glob("*.json")) - here.keys():
                with contextlib.suppress(FileNotFoundError):  # The pilot has dismissed the process meanwhile.
                    begin(file)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield started
    finally:
        ends.set()
        thread.join()
        for file in list(here):
            end(file)


OPERATIONS: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "all_reduce": (lambda dist, x: dist.all_reduce(x), "dist.all_reduce(x)"),
    "broadcast": (lambda dist, x: dist.broadcast(x, src=1), "dist.broadcast(x, src=1)"),
    "recv": (lambda dist, x: dist.recv(x, src=1), "dist.send(x, dst=0)"),
    "barrier": (lambda dist, _x: dist.barrier(), "dist.barrier()"),
}


def run_gloo_operation(place: str, operation: str, *, peer: str) -> float:
    import datetime

    import torch
    import torch.distributed as dist

    here, theirs = OPERATIONS[operation]
    how = {"is killed": "stays away"}.get(peer, peer)
    command = [sys.executable, "-c", PROGRAMS["peer"].replace("WORK", theirs), place, how]
    other = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        limit = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=2, timeout=limit)
        x = torch.ones(1 << 20)
        dist.all_reduce(x)
        if peer == "is killed":
            other.kill()
            other.wait()
        elif peer == "raises":
            other.wait()
        here(dist, x)
        return float(x[0])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if other.poll() is None and peer != "stays":
            other.kill()
        other.wait()


CALLS = {"open": "openat,open", "read": "read,pread64,readv,preadv,mmap", "write": "write,pwrite64,writev"}
_LIMIT_S = 20.0


@contextmanager
def failing_file(path: str, error: str, *, when: str) -> Iterator[None]:
    calls = CALLS[when]
    command = ["strace", "-f", "-p", str(os.getpid()), "-P", path, "-e", f"trace={calls}"]
    command += ["-e", f"inject={calls}:error={error}", "-o", "/dev/null"]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert tracer.stderr is not None
    said = tracer.stderr.readline()  # for example `strace: Process 4711 attached ...`
    if b"attached" not in said:
        tracer.kill()
        tracer.wait()
        raise SystemExit(f"strace cannot attach: {said!r}")
    try:
        yield
    finally:
        tracer.send_signal(signal.SIGTERM)
        tracer.wait(_LIMIT_S)
        tracer.stderr.close()
