"""Define the calls. Each call gets one fault on its first pilot, or makes one mistake on every pilot."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import stoker
from benchmarks.papers.schedmate.faults_lab import files, surroundings

MESSAGES: dict[str, Any] = msgspec.toml.decode(Path(__file__).with_name("messages.toml").read_bytes())
"""Messages of CUDA, NVML and NCCL, and the torch exception type, by fault."""
GB = 1 << 30
DECLARED_GB, DECLARED_MB = 10, 900
SICK_S = 1.5


class Case(NamedTuple):
    kind: str
    variant: str
    number: int
    folder: str


class Run(NamedTuple):
    case: Case
    strikes: bool
    node: str


class Device:
    """A stand-in for a GPU, with the used memory of this process and of other processes."""

    def __init__(self, operator: str) -> None:
        import pynvml
        import torch

        torch.ops.load_library(operator)
        self.nvml, self.torch, self.held_bytes = pynvml, torch, 0
        pynvml.nvmlInit()
        self.handle = pynvml.nvmlDeviceGetHandleByUUID(os.environ["CUDA_VISIBLE_DEVICES"])
        torch.cuda.is_initialized = lambda: True
        torch.cuda.device_count = lambda: 1
        torch.cuda.memory_reserved = lambda _device=0: self.held_bytes
        torch.cuda.mem_get_info = lambda _device=0: self.free_and_total()

    def free_and_total(self) -> tuple[int, int]:
        facts = self.nvml.nvmlDeviceGetMemoryInfo(self.handle)
        return int(facts.free), int(facts.total)

    def hold(self, size: int) -> None:
        from driver import machine

        self.held_bytes = size
        machine.take(size)

    def strike(self, kind: str, text: str) -> Any:
        torch = self.torch

        class Layer(torch.nn.Module):  # type: ignore[misc,name-defined]  # torch has no types here
            def forward(self, x: Any) -> Any:
                return torch.ops.stoker_faults.strike(torch.relu(x), kind, text)

        return torch.nn.Sequential(torch.nn.Linear(8, 8), Layer())(torch.ones(4, 8)).sum().item()

    def allocate(self, size: int) -> None:
        free, total = self.free_and_total()
        if free >= size:
            raise SystemExit(f"{free} bytes are free, and {size} were to be too many")
        kind, text = MESSAGES["out_of_memory"]
        others = total - free - self.held_bytes
        gb = {"asked": size, "total": total, "free": free, "others": others, "held": self.held_bytes}
        self.strike(kind, text.format(**{name: value / GB for name, value in gb.items()}))


class Kind(NamedTuple):
    act: Callable[[Device, Run], None]
    variants: tuple[str, ...] = ("",)


@stoker.context(memory=f"{DECLARED_MB} MB", device_memory=f"{DECLARED_GB} GB")
def device(operator: str) -> Device:
    import torch

    torch.set_num_threads(1)
    return Device(operator)


def run_case(device: Device, case: Case) -> str:
    node = os.environ["FAULTS_NODE"]
    surroundings.dismiss_neighbour()
    Path(node, "sick").unlink(missing_ok=True)
    for left in Path(os.environ["TMPDIR"]).glob("out-*"):  # Files of a failed call.
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    device.hold(0)
    with open(Path(case.folder, "ran", str(case.number)), "a+") as log:
        log.write(f"{os.environ['STOKER_PILOT']}\n")
        log.flush()
        log.seek(0)
        pilots = log.read().split()
    kind = FAULTS.get(case.kind) or MISTAKES[case.kind]
    kind.act(device, Run(case, pilots[0] == pilots[-1] or case.kind in MISTAKES, node))
    return pilots[-1]


def _kind_of_messages(group: str) -> Kind:
    def strike(device: Device, run: Run) -> None:
        if run.strikes:
            device.strike(*MESSAGES[group][run.case.variant])

    return Kind(strike, tuple(MESSAGES[group]))


def _lose_gpu(device: Device, run: Run) -> None:
    if not run.strikes:
        return
    if run.case.variant == "lost (NVML)":
        kept = os.environ["STANDIN_NVML"]  # The pilot still sees a working GPU and keeps it.
        lost = Path(run.node, "lost.json")
        lost.write_text(Path(kept).read_text().replace('"memory"', '"state": "lost", "memory"'))
        os.environ["STANDIN_NVML"] = str(lost)
        try:
            device.free_and_total()
        finally:
            os.environ["STANDIN_NVML"] = kept
    elif run.case.variant in MESSAGES["lost"]:
        device.strike(*MESSAGES["lost"][run.case.variant])
    else:
        Path(run.node, "sick").write_text(str(time.time() + SICK_S))
        device.strike(*MESSAGES["sick"][run.case.variant])


def _fail_gloo_operation(_device: Device, run: Run) -> None:
    place = f"{run.node}/meeting-{run.case.number}"
    surroundings.run_gloo_operation(place, run.case.variant, peer="is killed" if run.strikes else "stays")


def _failing_read(error: str) -> Callable[[Device, Run], None]:
    def read(_device: Device, run: Run) -> None:
        library, when = run.case.variant.split(", ")
        name, reader = files.READERS[library]
        path = str(Path(run.case.folder, "data", name))
        with surroundings.failing_file(path, error, when=when) if run.strikes else nullcontext():
            reader(path)

    return read


def _write_to_full_disk(_device: Device, run: Run) -> None:
    library, kept = run.case.variant.split(", ")
    folder = os.environ["TMPDIR"]
    if run.strikes:
        surroundings.request_neighbour("disk", folder, kept)
    _write(library, f"{folder}/out-{run.case.number}")


def _write(library: str, path: str) -> None:
    files.WRITERS[library](path)
    shutil.rmtree(path) if os.path.isdir(path) else Path(path).unlink(missing_ok=True)


def _exhaust_device_memory(device: Device, run: Run) -> None:
    device.hold(2 * GB)
    if run.strikes:
        place, uuid = f"{run.node}/use.d", os.environ["CUDA_VISIBLE_DEVICES"]
        surroundings.request_neighbour("device", place, uuid, 19 * 10**9)
        device.allocate(4 * GB)


def _exhaust_host_memory(_device: Device, run: Run) -> None:
    Path("/proc/self/oom_score_adj").write_text("900")  # The kernel then kills this process before the pilot.
    try:
        if run.strikes:
            surroundings.request_neighbour("memory", os.environ["FAULTS_GROUP"], 200 << 20)
        kept = bytearray(b"x") * (400 << 20)
        del kept
    finally:
        Path("/proc/self/oom_score_adj").write_text("0")


def _raise_user_error(device: Device, run: Run) -> None:
    torch = device.torch
    if run.case.variant == "assert":
        assert run.case.number < 0, "the batch is empty"
    mistakes: dict[str, Callable[[], Any]] = {
        "value": lambda: int(run.case.folder), "key": lambda: {"claim": 1}[run.case.folder],
        "linear": lambda: torch.nn.Linear(4, 2)(torch.zeros(3, 5)),
        "embedding": lambda: torch.nn.functional.embedding(torch.tensor([9]), torch.zeros(4, 2)),
    }  # fmt: skip
    mistakes[run.case.variant]()


def _read_missing_file(_device: Device, run: Run) -> None:
    name, reader = files.READERS[run.case.variant]
    reader(str(Path(run.case.folder, "data", "gone", name)))


def _raise_infrastructure_error(device: Device, run: Run) -> None:
    import errno

    said = {
        "EIO": OSError(errno.EIO, os.strerror(errno.EIO)),
        "ESTALE": OSError(errno.ESTALE, os.strerror(errno.ESTALE), "weights.pt"),
        "NCCL": RuntimeError(MESSAGES["connections"]["remote"][1]),
        "ECC": RuntimeError(MESSAGES["memory_errors"]["ECC"][1]),
        "memory": device.torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    }
    raise said[run.case.variant]


def _always_full(device: Device, run: Run) -> None:
    if run.case.variant == "print":
        with open("/dev/full", "w") as file:
            print("a line", file=file, flush=True)
    if run.case.variant == "torch":
        with open("/dev/full", "wb", 0) as raw:
            device.torch.save(device.torch.zeros(9), raw)
    import numpy

    numpy.zeros(1 << 16).tofile("/dev/full")


def _own_quota(_device: Device, run: Run) -> None:
    folder = Path(run.case.folder, "quota" if run.case.variant != "EDQUOT" else "data")
    path = str(folder / f"out-{run.case.number}")
    if run.case.variant == "EDQUOT":
        with surroundings.failing_file(path, "EDQUOT", when="write"):
            files.WRITERS["pickle"](path)
    _write(run.case.variant, path)


def _own_disk(device: Device, run: Run) -> None:
    import numpy

    path = f"{os.environ['TMPDIR']}/huge-{run.case.number}.npy"
    try:
        if run.case.variant == "torch.save":
            device.torch.save(device.torch.zeros(12 << 20), path)
        numpy.save(path, numpy.zeros(6 << 20))
    finally:
        Path(path).unlink(missing_ok=True)


def _own_device_memory(device: Device, _run: Run) -> None:
    device.hold(21 * 10**9)
    device.allocate(4 * GB)


def _own_memory(_device: Device, _run: Run) -> None:
    Path("/proc/self/oom_score_adj").write_text("900")
    kept = [bytearray(b"x") * (64 << 20) for _ in range(64)]
    del kept


def _own_peer(_device: Device, run: Run) -> None:
    place = f"{run.node}/meeting-{run.case.number}-{time.time()}"
    surroundings.run_gloo_operation(place, run.case.variant, peer="raises")


_OPENED = tuple(f"{library}, {when}" for when in ("open", "read") for library in files.READERS)
_READ = tuple(each for each in _OPENED if each.endswith("read") and "fromfile" not in each)
"""numpy.fromfile treats a failed read as the end of the file."""
FAULTS: dict[str, Kind] = {
    "uncorrectable memory error (ECC, NVLink)": _kind_of_messages("memory_errors"),
    "lost device": Kind(_lose_gpu, ("lost (NVML)", *MESSAGES["lost"], *MESSAGES["sick"])),
    "NCCL": _kind_of_messages("connections"),
    "Gloo, peer killed": Kind(_fail_gloo_operation, tuple(surroundings.OPERATIONS)),
    "ESTALE": Kind(_failing_read("ESTALE"), tuple(each for each in _OPENED if each != "numpy.fromfile, read")),
    "EIO": Kind(_failing_read("EIO"), _READ),
    "ENOSPC": Kind(_write_to_full_disk, tuple(
        f"{library}, {kept}" for kept in (0, 1_000_000) for library in files.WRITERS
        if kept == 0 or library not in ("pandas (csv)", "pillow")
    )),
    "device memory, a neighbour": Kind(_exhaust_device_memory),
    "host memory, a neighbour": Kind(_exhaust_host_memory),
}  # fmt: skip
MISTAKES: dict[str, Kind] = {
    "ValueError, KeyError, assertion": Kind(_raise_user_error, ("value", "key", "assert")),
    "tensors that do not fit": Kind(_raise_user_error, ("linear", "embedding")),
    "a file that is not there": Kind(_read_missing_file, tuple(files.READERS)),
    "raises a fault's exception itself": Kind(_raise_infrastructure_error, ("EIO", "ESTALE", "NCCL", "ECC", "memory")),
    "CUDA assertion, illegal address": _kind_of_messages("of_the_program"),
    "NCCL misused": _kind_of_messages("misused"),
    "/dev/full": Kind(_always_full, ("print", "torch", "numpy")),
    "own quota (ENOSPC, EDQUOT)": Kind(
        _own_quota, ("EDQUOT", *(each for each in files.WRITERS if each != "transformers"))
    ),
    "own file fills the disk": Kind(_own_disk, ("numpy.save", "torch.save")),
    "device memory, its own": Kind(_own_device_memory),
    "host memory, its own": Kind(_own_memory),
    "Gloo, its own rank raised": Kind(_own_peer, ("all_reduce", "broadcast")),
}  # fmt: skip
BOUNDED = frozenset({"host memory, its own", "Gloo, its own rank raised"})
"""Mistakes that look like a fault at first, so a few retries are allowed."""
