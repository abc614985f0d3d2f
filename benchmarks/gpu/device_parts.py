"""Parts of `make gpu` that look at the devices: what they are, how fast, and whether Stoker's probe passes."""

from __future__ import annotations

import os
import sys
import time

from benchmarks.gpu.place import REHEARSAL, Answer, Place, device_name, median_s


def device(answer: Answer, _: Place) -> None:
    """What is here, and how fast it is by itself."""
    import torch

    from stoker.pilot.devices import find_devices, nvml

    for found in find_devices("auto").offered[:8]:
        facts = found.facts
        answer[f"{facts.device}"] = f"{facts.kind}, {facts.memory_bytes / 1e9:.1f} GB, {facts.cores} cores {found.uuid}"
        if facts.processes:
            answer[f"{facts.device} processes at once"] = facts.processes
    answer["torch"] = f"{torch.__version__}, CUDA {torch.version.cuda}, sees {torch.cuda.device_count()}"
    driver = nvml.load()
    try:
        driver.nvmlInit()
        answer["driver"] = nvml.text(driver.nvmlSystemGetDriverVersion())
    except Exception as error:
        answer["driver"] = f"none ({error})"
    answer["PID namespace"] = os.readlink("/proc/self/ns/pid")
    where, size = device_name(), 256 if REHEARSAL else 8192
    kind = torch.float32 if where == "cpu" else torch.bfloat16
    one, other = (torch.randn(size, size, device=where, dtype=kind) for _ in range(2))
    answer[f"matrix product of {size}, TFLOP/s"] = 2 * size**3 / median_s(lambda: one @ other) / 1e12
    count = (4 << 20) if REHEARSAL else (1 << 30)
    host = torch.empty(count, dtype=torch.uint8, pin_memory=where != "cpu")
    there = torch.empty(count, dtype=torch.uint8, device=where)
    twin = torch.empty_like(there)
    answer["host to device, pinned, GB/s"] = count / median_s(lambda: there.copy_(host, non_blocking=True)) / 1e9
    answer["device to device, read and written, GB/s"] = 2 * count / median_s(lambda: twin.copy_(there)) / 1e9


def probe(answer: Answer, _: Place) -> None:
    """Stoker's own look: finding devices, and whether each computes."""
    from stoker.pilot.agent import probing
    from stoker.pilot.devices import find_devices

    began = time.perf_counter()
    found = find_devices("auto")
    answer["devices are found, s"] = time.perf_counter() - began
    for trouble in found.troubles:
        answer["trouble"] = trouble
    for each in found.offered[:8]:
        began = time.perf_counter()
        said, words = probing.run((sys.executable, "-P", "-m", "stoker.pilot.devices.probe"), each)
        answer[f"{each.facts.device} probed, s"] = time.perf_counter() - began
        answer[f"{each.facts.device} is"] = f"{said.name}{': ' if words else ''}{words}"
