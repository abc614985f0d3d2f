"""Doctor's look at the machine: devices, memory, disks, limits, sockets, clock."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import zmq

from stoker.contexts.folders import state_folder
from stoker.errors import StokerError
from stoker.manager.cli.finding import Finding, Level
from stoker.pilot.devices import PilotDevice, find_devices, gpu
from stoker.protocol.to_manager import DeviceFacts
from stoker.site import Site
from stoker.units import show_bytes

_FILES = 4096
_DISK_BYTES = 2_000_000_000
_SKEW_S = 2.0
_CURVE_WITHIN_MS = 5_000
_DRIVER_WITHIN_S = 20.0


def devices() -> Iterator[Finding]:
    """What a pilot on this machine would offer: the very code that a pilot runs."""
    try:
        devices = find_devices("auto")
    except StokerError as error:
        yield Finding("devices", Level.NEED, f"no device for a pilot: {error}")
        return
    for trouble in devices.troubles:
        yield Finding("devices", Level.WARN, trouble, "ask your admin: the node's GPU or its driver is at fault")
    cores = sum(device.facts.cores for device in devices.offered)
    text = (
        f"a pilot here would offer {_in_words(devices.offered)}, and {cores} cores (this machine has {os.cpu_count()})"
    )
    yield Finding("devices", Level.OK, text)


def devices_of(site: Site) -> Iterator[Finding]:
    """What a pilot of a site of this machine would offer."""
    topic, wanted = f"site {site.name}", f'[pilot] devices = "{site.pilot.devices}"'
    try:
        found = find_devices(site.pilot.devices, gpu_cores=site.pilot.gpu_cores)
    except StokerError as error:
        yield Finding(topic, Level.NEED, f"{topic}: {wanted}: {error}", f"mend {wanted}")
        return
    for trouble in found.troubles:
        yield Finding(topic, Level.WARN, f"{topic}: {wanted}: {trouble}")
    yield Finding(topic, Level.OK, f"{topic}: pilots on this machine, each with {_in_words(found.offered)}")


def _in_words(devices: Sequence[PilotDevice]) -> str:
    """`1 x NVIDIA A10 with 24.0 GB, 1 x cpu with 30.0 GB (14 spare cores)`."""
    kinds: dict[str, list[DeviceFacts]] = {}
    for device in devices:
        kinds.setdefault(device.facts.kind, []).append(device.facts)
    said = []
    for kind, facts in kinds.items():
        spare = sum(each.cores for each in facts if each.spare)
        beside = f" ({spare} spare core{'s' * (spare != 1)})" if spare else ""
        said.append(f"{len(facts)} x {kind} with {show_bytes(min(each.memory_bytes for each in facts))}{beside}")
    return ", ".join(said)


def torch_and_driver() -> Iterator[Finding]:
    """The NVIDIA driver through NVML, and whether the installed torch can use it."""
    build = _torch_cuda()
    try:
        driver, count, newest = gpu.within(_DRIVER_WITHIN_S, _driver)
    except TimeoutError:
        fix = "ask your admin: the driver hangs (nvidia-smi will, too)"
        yield Finding("driver", Level.WARN, f"the NVIDIA driver has not answered for {_DRIVER_WITHIN_S:g} s", fix)
        return
    except Exception as error:
        yield Finding("driver", Level.NO, f"no NVIDIA driver here ({error}): fine, a login node needs none")
        return
    can = f"{newest // 1000}.{newest % 1000 // 10}"
    text = f"NVIDIA driver {driver} (CUDA up to {can}), {count} GPU{'s' * (count != 1)}"
    if build is None:
        yield Finding("driver", Level.WARN, f"{text}, but torch is not installed", 'pip install "stoker[models]"')
    elif not build:
        fix = "install a CUDA build of torch in this environment: https://pytorch.org/get-started/locally"
        yield Finding("driver", Level.WARN, f"{text}, but this torch was built for CPUs alone", fix)
    elif int(build.split(".")[0]) > newest // 1000:
        fix = f"install a torch built for CUDA {can} or earlier, or a newer driver"
        yield Finding("driver", Level.WARN, f"{text}, but torch was built for CUDA {build}", fix)
    else:
        yield Finding("driver", Level.OK, f"{text}; torch was built for CUDA {build}")


def _driver() -> tuple[str, int, int]:
    """The driver's version, how many GPUs it has, and the newest CUDA that it knows (13020 is 13.2)."""
    import pynvml

    pynvml.nvmlInit()
    version = str(pynvml.nvmlSystemGetDriverVersion())
    return version, int(pynvml.nvmlDeviceGetCount()), int(pynvml.nvmlSystemGetCudaDriverVersion())


def _torch_cuda() -> str | None:
    """The CUDA version that torch was built for, `""` for a CPU build, None without torch. Read, not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    text = (Path(next(iter(spec.submodule_search_locations))) / "version.py").read_text()
    found = re.search(r"^cuda(?::.*?)?\s*=\s*['\"](.*?)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def disks() -> Iterator[Finding]:
    """Room for measurements and snapshots (state folder) and for pilots' caches (temporary folder)."""
    for what, path, variable in (
        ("state folder", state_folder(), "STOKER_HOME"),
        ("pilots' cache", Path(tempfile.gettempdir()), "TMPDIR"),
    ):
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        free = shutil.disk_usage(there).free
        text = f"{what} {path}: {show_bytes(free)} free"
        if not os.access(there, os.W_OK | os.X_OK):
            yield Finding(
                "disk", Level.NEED, f"{what} {path} cannot be written", f"name another: export {variable}=FOLDER"
            )
        elif free < _DISK_BYTES:
            yield Finding("disk", Level.WARN, f"{text}, little for models", f"make room, or export {variable}=FOLDER")
        else:
            yield Finding("disk", Level.OK, text)


def limits() -> Iterator[Finding]:
    """Open files: the manager holds one a pilot and some for each client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft:,} open files allowed" + (f" (up to {hard:,})" if hard > soft else "")
    if hard != resource.RLIM_INFINITY and hard < _FILES:
        fix = f"ask your admin for `nofile` of {_FILES} or more (limits.conf)"
        yield Finding("files", Level.WARN, f"{text}: enough for about {hard // 2} pilots", fix)
    elif soft < _FILES:
        yield Finding("files", Level.WARN, f"{text}: enough for about {soft // 2} pilots", f"ulimit -n {_FILES}")
    else:
        yield Finding("files", Level.OK, text)


def sockets() -> Iterator[Finding]:
    """A message over loopback with CURVE, as sessions send them."""
    if not zmq.has("curve"):
        fix = "pip install --force-reinstall --only-binary :all: pyzmq"
        yield Finding("sockets", Level.NEED, "this ZeroMQ was built without CURVE: sessions would not be private", fix)
        return
    started = time.perf_counter()
    with zmq.Context() as context:
        context.linger = 0
        with context.socket(zmq.REP) as server, context.socket(zmq.REQ) as client:
            public, server.curve_secretkey = zmq.curve_keypair()
            server.curve_server = True
            port = server.bind_to_random_port("tcp://127.0.0.1")
            client.curve_serverkey = public
            client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send(b"?")
            if not server.poll(_CURVE_WITHIN_MS):
                fix = "a firewall on the loopback interface? allow TCP between processes of 127.0.0.1"
                yield Finding("sockets", Level.NEED, f"nothing arrives over loopback (port {port})", fix)
                return
            server.recv()
    took = (time.perf_counter() - started) * 1e3
    yield Finding(
        "sockets", Level.OK, f"loopback sockets with CURVE (ZeroMQ {zmq.zmq_version()}, first message in {took:.0f} ms)"
    )


def clock() -> Iterator[Finding]:
    """The clock against that of the disk: the ages of files in a shared folder need them to agree."""
    folder = state_folder()
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        folder = Path(tempfile.gettempdir())
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        before = time.time()
        file.write(b"x")
        file.flush()
        skew = os.stat(file.name).st_mtime - before
    if abs(skew) > _SKEW_S:
        fix = "have both set by NTP (timedatectl set-ntp true)"
        yield Finding("clock", Level.WARN, f"the clock of {folder} is {skew:+.1f} s from this machine's", fix)
    else:
        yield Finding("clock", Level.OK, f"clock {time.strftime('%Y-%m-%d %H:%M:%S %Z')}, the disk agrees")
