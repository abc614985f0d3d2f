"""Parts of `make gpu` that have no session: the devices, the model's files, and turns."""

from __future__ import annotations

import os
import time

from benchmarks.gpu.place import BANDWIDTH, PINNED, REHEARSAL, Answer, Place, device_name, median_s


def device(answer: Answer, _: Place) -> None:
    """Which devices are here, and their bandwidth."""
    import torch

    from stoker.pilot.devices import find_devices, nvml

    where, size = device_name(), 256 if REHEARSAL else 8192
    kind = torch.float32 if where == "cpu" else torch.bfloat16
    count = (4 << 20) if REHEARSAL else (1 << 30)
    host = torch.empty(count, dtype=torch.uint8, pin_memory=where != "cpu")
    there = torch.empty(count, dtype=torch.uint8, device=where)
    twin = torch.empty_like(there)
    answer[BANDWIDTH] = 2 * count / median_s(lambda: twin.copy_(there)) / 1e9
    answer[PINNED] = count / median_s(lambda: there.copy_(host, non_blocking=True)) / 1e9
    one, other = (torch.randn(size, size, device=where, dtype=kind) for _ in range(2))
    answer[f"matrix product of {size}, TFLOP/s"] = 2 * size**3 / median_s(lambda: one @ other) / 1e12
    answer["torch"] = f"{torch.__version__}, CUDA {torch.version.cuda}, sees {torch.cuda.device_count()}"
    began = time.perf_counter()
    found = find_devices("auto")
    answer["devices are found, s"] = time.perf_counter() - began
    for each in found.offered[:8]:
        facts = each.facts
        answer[f"{facts.device}"] = f"{facts.kind}, {facts.memory_bytes / 1e9:.1f} GB, {facts.cores} cores {each.uuid}"
        if facts.processes:
            answer[f"{facts.device} processes at once"] = facts.processes
    for trouble in found.troubles:
        answer["trouble"] = trouble
    driver = nvml.load()
    try:
        driver.nvmlInit()
        answer["driver"] = nvml.text(driver.nvmlSystemGetDriverVersion())
    except Exception as error:
        answer["driver"] = f"none ({error})"
    answer["PID namespace"] = os.readlink("/proc/self/ns/pid")


def model(answer: Answer, place: Place) -> None:
    """The model that other parts load."""
    from benchmarks.gpu.model import SMOLLM2, TINY, build

    began = time.perf_counter()
    answer["bytes"] = build(place.model, TINY if REHEARSAL else SMOLLM2, device=device_name())
    answer["made and written, s"] = time.perf_counter() - began


def turns(answer: Answer, _: Place) -> None:
    """What it costs that libraries on one device take turns: iterations of 20 ms on a core."""
    from benchmarks.engine.turns import _CASES, SIDE
    from benchmarks.harness import run_side

    total = 16 if REHEARSAL else 100
    for case, (count, how) in _CASES.items():
        one = run_side(SIDE, "--libraries", str(count), "--iterations", str(total // count), *how, timeout_s=20.0)
        answer[f"{case}: idle between two iterations, us"] = one["gap_us"]
        answer[f"{case}: time besides the iterations, %"] = 100 * (one["seconds"] / one["computed_s"] - 1)
