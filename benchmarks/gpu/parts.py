"""`python -m benchmarks.gpu.parts PART ANSWER`: one part of `make gpu`; what it measured goes into the file ANSWER.

Numbers are written as they come, so that a part that is cut off leaves those that it had.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import stoker
from stoker import causal_lm, context

REHEARSAL = bool(os.environ.get("STOKER_GPU_REHEARSAL"))
GB = 10**9
SITE = """
name = "gpu"
[provider]
kind = "local"
[pilot]
devices = "{devices}"
probe = "never"
[session]
heartbeat = "500 ms"
lease = "20 s"
"""


class Answer:
    """Numbers by their names, kept in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._said: dict[str, Any] = {"numbers": {}}

    def __setitem__(self, name: str, value: object) -> None:
        self._said["numbers"][name] = value
        self._write()

    def skip(self, why: str) -> None:
        """It cannot run here."""
        self._said["skipped"] = why
        self._write()

    def _write(self) -> None:
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps(self._said))
        draft.replace(self._file)


class Place:
    """Where a part works, and how large the model is."""

    def __init__(self, work: Path, size_bytes: int) -> None:
        self.work = work
        self.size_bytes = size_bytes if not REHEARSAL else min(size_bytes, 20_000_000)
        self.model = work / "model"

    @contextmanager
    def session(self, *, devices: str = "") -> Iterator[Any]:
        """A session on this machine's GPUs; rehearsed on cores."""
        devices = devices or ("cpu:2" if REHEARSAL else "gpu")
        site = self.work / f"{devices.replace(':', '-')}.toml"
        site.write_text(SITE.format(devices=devices))
        with stoker.load(str(site), run_dir=str(self.work / "runs")) as session:
            yield session


def _on_device() -> str:
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _seconds(work: Callable[[], Any], *, times: int = 5) -> float:
    """The median time of some work on the device, once warm."""
    took = []
    for turn in range(times + 2):
        _synchronize()
        began = time.perf_counter()
        work()
        _synchronize()
        if turn > 1:
            took.append(time.perf_counter() - began)
    return statistics.median(took)


# ---- parts


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
    where, size = _on_device(), 256 if REHEARSAL else 8192
    kind = torch.float32 if where == "cpu" else torch.bfloat16
    one, other = (torch.randn(size, size, device=where, dtype=kind) for _ in range(2))
    answer[f"matrix product of {size}, TFLOP/s"] = 2 * size**3 / _seconds(lambda: one @ other) / 1e12
    count = (4 << 20) if REHEARSAL else (1 << 30)
    host = torch.empty(count, dtype=torch.uint8, pin_memory=where != "cpu")
    there = torch.empty(count, dtype=torch.uint8, device=where)
    twin = torch.empty_like(there)
    answer["host to device, pinned, GB/s"] = count / _seconds(lambda: there.copy_(host, non_blocking=True)) / 1e9
    answer["device to device, read and written, GB/s"] = 2 * count / _seconds(lambda: twin.copy_(there)) / 1e9


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


def model(answer: Answer, place: Place) -> None:
    """The model that other parts load."""
    from benchmarks.gpu.model import build

    began = time.perf_counter()
    answer["bytes"] = build(place.model, size_bytes=place.size_bytes, device=_on_device())
    answer["made and written, s"] = time.perf_counter() - began


def load(answer: Answer, place: Place) -> None:
    """Load times and rates, through a session: with a cold cache of objects, with what the first load has left, and of
    a pickled model from its file and from the snapshot that the first load has made."""
    from benchmarks.gpu.model import pickled_of

    size = sum(file.stat().st_size for file in place.model.glob("*.safetensors"))
    if not size:
        return answer.skip("there is no model: the part `model` did not make one")
    ways = (("first", place.model), ("again", place.model))
    ways += (("pickled, first", pickled_of(place.model)), ("from its snapshot", pickled_of(place.model)))
    for what, source in ways:
        wanted = stoker.app(context=causal_lm(source, dtype="bfloat16"))(_loads)
        began = time.perf_counter()
        with place.session() as session:
            told = wanted().result(100)
            whole_s = time.perf_counter() - began
            answer[f"{what}: from nothing to a result, s"] = whole_s
            (found,) = [each for each in session.status().contexts if each.loads]
            answer[f"{what}: start and load, s"] = found.load_s
            answer[f"{what}: GB/s of start and load"] = size / found.load_s / 1e9
            answer[f"{what}: how"] = told["origin"] or "from its files"
            own = re.search(r"in ([0-9.]+) (ms|s)", told["origin"])
            if own:
                own_s = float(own[1]) / (1000 if own[2] == "ms" else 1)
                answer[f"{what}: GB/s of the loader alone"] = size / max(own_s, 1e-3) / 1e9
            answer["device"] = told["device"]
    return None


def _loads(llm: Any) -> dict[str, Any]:
    return {"origin": llm.origin, "device": llm.device}


def _generate(llm: Any, batch: int, tokens: int) -> tuple[float, float]:
    import time

    prompts = [f"{number}: what is written here is read by nobody, byte by byte" for number in range(batch)]
    llm.generate(prompts, max_new_tokens=4, batch_size=batch)
    began = time.perf_counter()
    llm.generate(prompts, max_new_tokens=1, batch_size=batch)
    first_s = time.perf_counter() - began
    began = time.perf_counter()
    llm.generate(prompts, max_new_tokens=tokens, batch_size=batch)
    return first_s, time.perf_counter() - began


def _score(llm: Any, count: int) -> float:
    import time

    prompts = [f"claim {number}: the sea is {'salt' * (1 + number % 20)}" for number in range(count)]
    llm.label_scores(prompts[:2], [" true", " false"])
    began = time.perf_counter()
    llm.label_scores(prompts, [" true", " false"], batch_size=64)
    return time.perf_counter() - began


def tokens(answer: Answer, place: Place) -> None:
    """Tokens a second by batch, and claims scored a second."""
    if not place.model.exists():
        return answer.skip("there is no model: the part `model` did not make one")
    recipe = causal_lm(place.model, dtype="bfloat16")
    generate, score = stoker.app(context=recipe)(_generate), stoker.app(context=recipe)(_score)
    count = 8 if REHEARSAL else 64
    with place.session():
        for batch in (1, 8, 64):
            first_s, took_s = generate(batch, count).result(70)
            answer[f"batch {batch}: first token, ms"] = first_s * 1e3
            answer[f"batch {batch}: tokens/s"] = batch * count / took_s
        claims = 32 if REHEARSAL else 512
        answer["claims scored/s"] = claims / score(claims).result(70)
    return None


@context
def imports_torch(number: int) -> int:
    """A context of nothing but torch; each number is another one."""
    import torch

    del torch
    return number


def zygote(answer: Answer, place: Place) -> None:
    """From a submitted call to the first operation on the device, of a zygote that starts, and of a warm one."""
    with place.session():
        for number, what in enumerate(("cold zygote", "warm zygote", "warm zygote again")):
            call = stoker.app(context=imports_torch(number))(_operation)
            began = time.perf_counter()
            told = call().result(50)
            answer[f"{what}: call to result, s"] = time.perf_counter() - began
            answer[f"{what}: first operation, s"] = told


def _operation(_: Any) -> float:
    import time

    import torch

    where = "cuda:0" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    torch.ones(1, device=where).sum().item()
    return time.perf_counter() - began


# ---- memory


@context
def takes_torch(size: int) -> Any:
    """So much of the GPU, by PyTorch."""
    import torch

    if not torch.cuda.is_available():
        return _takes_stand_in(size)
    return torch.empty(size, dtype=torch.uint8, device="cuda:0")


@context
def takes_driver(size: int) -> Any:
    """So much of the GPU by CUDA's driver alone, of which no framework knows."""
    import ctypes
    import os

    if os.environ.get("STOKER_GPU_REHEARSAL"):
        return _takes_stand_in(size)
    from stoker.pilot.devices import cuda

    gpu = cuda.open_first()
    place = ctypes.c_uint64()
    cuda.check(gpu._driver, "cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(size))
    return gpu, place


def _takes_stand_in(size: int) -> int:
    from driver.machine import take

    take(size + 500_000_000)
    return size


def _own(_: Any) -> dict[str, int]:
    import os
    import sys

    torch = sys.modules.get("torch")
    held = torch.cuda.memory_reserved() if torch is not None and torch.cuda.is_available() else 0
    return {"pid": os.getpid(), "torch": held}


def _nvml_of(pid: int) -> tuple[int, int]:
    """What NVML says of a process on the first GPU, and of the whole GPU."""
    from stoker.pilot.devices import nvml as names

    nvml = names.load()
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    used = {each.pid: each.usedGpuMemory for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    info = nvml.nvmlDeviceGetMemoryInfo(handle)
    return used.get(pid) or 0, int(info.total) - int(info.free)


def _promised(session: Any) -> int:
    """Bytes of the first device that libraries are promised."""
    return int(session.status().pilots[0].devices[0].promised_bytes)


def memory(answer: Answer, place: Place) -> None:
    """What NVML measures of libraries against what the session promises them, and what CUDA takes by itself."""
    size = 2 * GB
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # both libraries on one GPU
    with place.session(devices="gpu") as session:
        for what, recipe in (("torch", takes_torch(size)), ("driver", takes_driver(size))):
            told = stoker.app(context=recipe)(_own)().result(60)
            nvml_bytes, taken = _nvml_of(told["pid"])
            answer[f"{what}: NVML of its process"] = nvml_bytes
            answer[f"{what}: NVML of the whole GPU"] = taken
            if told["torch"]:
                answer[f"{what}: PyTorch holds"] = told["torch"]
                answer[f"{what}: CUDA takes by itself"] = nvml_bytes - told["torch"]
            else:
                answer[f"{what}: CUDA takes by itself"] = nvml_bytes - size
            began = time.monotonic()
            while _promised(session) > 4 * size and time.monotonic() < began + 10.0:
                time.sleep(0.05)
            answer[f"{what}: its promise rests on a measurement after, s"] = time.monotonic() - began
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            status = session.status()
            known = [each.device_bytes for each in status.libraries]
            if len(known) == 2 and all(known) and min(known) >= size:
                break
            time.sleep(0.2)
        for each in status.libraries:
            answer[f"status: {each.recipe} uses"] = each.device_bytes
        first = status.pilots[0].devices[0]
        answer["status: promised"] = first.promised_bytes
        answer["status: the device has"] = first.memory_bytes
        answer["promised covers what is used"] = first.promised_bytes >= sum(known)


def _too_much(_: Any) -> str:
    import torch

    if not torch.cuda.is_available():
        raise MemoryError("a rehearsal")
    return str(torch.empty(1 << 50, dtype=torch.uint8, device="cuda:0").sum())


def _die(_: Any) -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def faults(answer: Answer, place: Place) -> None:
    """A call that asks for too much memory fails alone; the memory of a library that is killed is free again."""
    with place.session(devices="gpu") as session:
        recipe = takes_torch(GB)
        own = stoker.app(context=recipe)(_own)
        before = own().result(60)["pid"]
        try:
            stoker.app(context=recipe)(_too_much)().result(60)
            answer["too much memory"] = "was granted"
        except Exception as error:
            answer["too much memory"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        answer["its library lives on"] = own().result(60)["pid"] == before
        _, taken = _nvml_of(before)
        try:
            stoker.app(context=recipe)(_die)().result(100)
        except Exception as error:
            answer["a library that is killed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        answer["a new library serves"] = own().result(60)["pid"] != before
        answer["taken of the GPU before, and with the new library"] = f"{taken:,} and {_nvml_of(before)[1]:,}"
        answer["devices in quarantine"] = sum(
            bool(device.fault) for pilot in session.status().pilots for device in pilot.devices
        )


# ---- several devices


def _exchange(_: Any, count: int) -> tuple[int, float]:
    import time

    import torch

    import stoker
    from stoker.tuning.exchange import meet

    seat = stoker.gang()
    where = "cuda:0" if torch.cuda.is_available() else "cpu"
    values = torch.ones(count, device=where)
    with meet(
        rank=seat.rank, size=seat.size, rendezvous=seat.rendezvous, job="gpu", device=where, limit_s=40.0,
        listener=seat.listener, key=seat.key,
    ) as exchange:  # fmt: skip
        exchange.sum(values.clone())
        took = []
        for _turn in range(5):
            again = torch.ones(count, device=where)
            if where != "cpu":
                torch.cuda.synchronize()
            began = time.perf_counter()
            exchange.sum(again)
            if where != "cpu":
                torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
    return int(again[0].item()), sorted(took)[len(took) // 2]


def gang(answer: Answer, place: Place) -> None:
    """The sum over two devices, by NCCL (rehearsed on cores by Gloo)."""
    import torch

    if torch.cuda.device_count() < 2 and not REHEARSAL:
        return answer.skip(f"a gang wants two GPUs; there is {torch.cuda.device_count()}")
    count = 1 << (16 if REHEARSAL else 26)
    with place.session():
        began = time.perf_counter()
        total, took_s = stoker.app(context=imports_torch(0), gang=2)(_exchange)(count).result(55)
        answer["sum of ones over the ranks"] = total
        answer["from the call to the result, s"] = time.perf_counter() - began
        answer[f"sum of {count * 4} bytes, ms"] = took_s * 1e3
        answer["GB/s"] = count * 4 / took_s / 1e9
    return None


def tune(answer: Answer, place: Place) -> None:
    """Iterations of prompt tuning a second, on the model."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.gpu.model import tokenizer
    from stoker.contexts.engine import CausalLM
    from stoker.tuning.job import Data, Job, Metric, Prompt, Training, Until
    from stoker.tuning.samples import Sample
    from stoker.tuning.tune import tune as run

    if not place.model.exists():
        return answer.skip("there is no model: the part `model` did not make one")
    loaded = AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.bfloat16).to(_on_device())
    found = CausalLM(loaded.eval().requires_grad_(False), tokenizer(), name="random")
    samples = tuple(
        Sample(f"{'ab'[n % 2]} {n}, and some words", "yes" if n % 2 else "no", f"line {n}") for n in range(64)
    )
    iterations = 3 if REHEARSAL else 20
    job = Job(
        data=Data("none.jsonl", evaluation_samples=8), name="gpu", prompt=Prompt(initial="say yes or no"),
        until=Until(metric=Metric.LOSS, iterations=iterations, evaluate_every=iterations), training=Training(batch=16),
    )  # fmt: skip
    began = time.perf_counter()
    told = run(found, job, samples)
    answer["iterations/s"] = iterations / (time.perf_counter() - began)
    answer["loss at the end"] = float(told.points[-1].loss)
    return None


PARTS = {
    each.__name__: each for each in (device, probe, model, load, tokens, zygote, memory, faults, gang, tune)
}  # fmt: skip


def main() -> None:
    """Run one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("answer", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--size", type=int, required=True)
    asked = parser.parse_args()
    PARTS[asked.part](Answer(asked.answer), Place(asked.work, asked.size))


if __name__ == "__main__":
    main()
