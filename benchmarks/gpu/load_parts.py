"""Parts of `make gpu` about awareness and loads.

Loads run in one session with a warm zygote, except loads from a peer. Recipes differ in `threads`, so each load gets
a separate library.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import stoker
from benchmarks.gpu.bars import FULL_OF_NONE, OF_PINNED, WEIGHTS_ALONE
from benchmarks.gpu.place import PINNED, REHEARSAL, Answer, Place, device_memory, device_name
from stoker import causal_lm, context

CLAIMS = 16
_READY = re.compile(r"ready: ([0-9.]+) s to start, ([0-9.]+) s to load")
_OWN = re.compile(r", in ([0-9.]+) (ms|s)(?: \(|$)")
_STREAM = re.compile(r"of weights in .*?, ([0-9.]+) GB/s")
_CAME = re.compile(r"arrived: (\d+) bytes from its origin, (\d+) from peers, ([0-9.]+) s")


def _verify(llm: Any, number: int) -> int:
    claims = [f"Claim {number}, {each}: the sea is {'salt' * (1 + each % 4)}. Answer:" for each in range(CLAIMS)]
    return len(llm.label_scores(claims, [" true", " false"], batch_size=CLAIMS))


def awareness(answer: Answer, place: Place) -> None:
    rates = {}
    for level, in_flight in (("full", 2), ("none", 1), ("disk", 1)):
        recipe = causal_lm(place.model, dtype="bfloat16", awareness=level)
        share_s = 3.0 if REHEARSAL else min(15.0, place.left_s() / 4)
        with place.session(policy="exclusive"):
            calls, seconds = _run_calls_for(stoker.app(context=recipe)(_verify), share_s, in_flight=in_flight)
            answer[f"{level}: calls of {CLAIMS} inferences"] = calls
            answer[f"{level}: from the first call to the last result, s"] = seconds
            rates[level] = calls * CLAIMS / seconds
            answer[f"{level}: inferences/s"] = rates[level]
            if level == "full":
                calls, seconds = _run_calls_for(stoker.app(context=recipe)(_verify), share_s / 3, in_flight=in_flight)
                answer["full, without its load: inferences/s"] = calls * CLAIMS / seconds
        if level == "none":
            answer[FULL_OF_NONE] = rates["full"] / rates["none"]
    answer["full / disk, inferences/s"] = rates["full"] / rates["disk"]


def _run_calls_for(app: Any, seconds: float, *, in_flight: int) -> tuple[int, float]:
    began = time.perf_counter()
    waiting, ended = [app(number) for number in range(in_flight)], 0
    while waiting:
        waiting.pop(0).result(80)
        ended += 1
        if time.perf_counter() - began < seconds:
            waiting.append(app(in_flight + ended))
    return ended, time.perf_counter() - began


@context
def _nothing(number: int) -> int:
    return number


def _operation(_: Any) -> float:
    import time

    import torch

    where = "cuda:0" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()
    torch.ones(1, device=where).sum().item()
    return time.perf_counter() - began


def _sleep_and_wake(llm: Any) -> float:
    import time

    import torch

    llm.generate(["a"], max_new_tokens=1)
    llm.sleep()
    began = time.perf_counter()
    llm.wake()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def load(answer: Answer, place: Place) -> None:
    from benchmarks.gpu.model import pickle_of, weights_bytes

    loads = _Loads(answer, place, weights_bytes(place.model))
    with place.session() as session:
        loads.session = session
        loads.imports(place.model)
        loads.measure("from a file, first", place.model)
        loads.measure("from a file, warm", place.model)
        loads.cold("from a file, cold", place.model)
        with answer.seconds("the model is pickled, s"):
            pickled = pickle_of(place.model)
        loads.measure("from a pickle, its snapshot is made", pickled)
        loads.measure("from a snapshot, warm", pickled)
        loads.measure("from a snapshot, warm, again", pickled)
        loads.cold("from a snapshot, cold", pickled)
        loads.host_memory(place.model)
    shutil.rmtree(pickled)
    _measure_script_load(answer, place, loads.size)
    _measure_peer_transfer(answer, place)
    shutil.rmtree(place.work / "scratches", ignore_errors=True)  # free the space, because the disk may be small


class _Loads:
    session: Any

    def __init__(self, answer: Answer, place: Place, size: int) -> None:
        self.size = size
        self._answer, self._place = answer, place
        self._pinned = place.number("device", PINNED)
        self._threads = 0

    def imports(self, model: Path) -> None:
        preload = causal_lm(model).preload
        for number, what in enumerate(("the zygote starts and imports", "a fork of the warm zygote")):
            recipe = _nothing.with_options(preload=preload)(number)
            with self._answer.seconds(f"{what}: call to result, s"):
                first_s = stoker.app(context=recipe)(_operation)().result(80)
            self._answer[f"{what}: first operation on the device, s"] = first_s

    def recipe(self, source: Path) -> Any:
        self._threads += 1
        return causal_lm(source, dtype="bfloat16", threads=self._threads, **device_memory("8 GB"))

    def measure(self, what: str, source: Path) -> None:
        recipe = self.recipe(source)
        with self._answer.seconds(f"{what}: call to result, s"):
            origin = stoker.app(context=recipe)(lambda llm: str(llm.origin))().result(100)
        start_s, load_s = _load_times_of_context(self.session, recipe)
        own_s, stream = load_times_of_origin(origin)
        self._answer[f"{what}: start of the library, s"] = start_s
        self._answer[f"{what}: load, s"] = load_s
        self._answer[f"{what}: how"] = origin
        self._rate(what, self.size / max(own_s or load_s, 1e-3) / 1e9)
        if stream:
            self._rate(f"{what}, {WEIGHTS_ALONE}", stream)

    def cold(self, what: str, source: Path) -> None:
        files = [file for pattern in ("*.safetensors", "*.bin") for file in self._place.work.rglob(pattern)]
        self._page_cache(f"{what}: of all files, still in the page cache, %", lambda: _drop_from_page_cache(files))
        self.measure(what, source)
        self._page_cache(f"{what}: of all files, in the page cache after it, %", lambda: _page_cache_share(files))

    def _page_cache(self, what: str, look: Callable[[], float]) -> None:
        try:
            self._answer[what] = 100 * look()
        except OSError as error:  # Some kernels do not report the page cache.
            self._answer[what] = f"not known: {error}"

    def host_memory(self, source: Path) -> None:
        seconds = stoker.app(context=self.recipe(source))(_sleep_and_wake)().result(60)
        self._rate("from host memory (wake)", self.size / max(seconds, 1e-3) / 1e9)

    def _rate(self, what: str, rate: float) -> None:
        self._answer[f"{what}: GB/s"] = rate
        if self._pinned:
            self._answer[f"{what}: {OF_PINNED}"] = rate / self._pinned


def _drop_from_page_cache(files: Iterable[Path]) -> float:
    """Ask the kernel to drop files from its page cache. Return the share that stays."""
    files = list(files)
    for file in files:
        with file.open("rb") as opened:
            os.fdatasync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return _page_cache_share(files)


def _page_cache_share(files: Iterable[Path]) -> float:
    pages = inside = 0
    for file in {(each.stat().st_dev, each.stat().st_ino): each for each in files}.values():
        of_file = _resident_pages(file)
        pages += len(of_file)
        inside += sum(1 for page in of_file if page & 1)
    return inside / max(1, pages)


def _resident_pages(file: Path) -> bytes:
    size = file.stat().st_size
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    if not size:
        return b""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(start), ctypes.c_size_t(size), found)
        del start  # A mapping with references cannot be closed.
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {file}")
    return bytes(found)


def load_times_of_origin(origin: str) -> tuple[float, float]:
    own, stream = _OWN.search(origin), _STREAM.search(origin)
    own_s = float(own[1]) / (1000 if own[2] == "ms" else 1) if own else 0.0
    return own_s, float(stream[1]) if stream else 0.0


def _load_times_of_context(session: Any, recipe: Any) -> tuple[float, float]:
    numbers = [library.library for library in session.status().libraries if recipe.key[:4] in library.recipe]
    for number in reversed(numbers):
        for line in session.explain(f"lib-{number}").lines:
            if found := _READY.search(line.text):
                return float(found[1]), float(found[2])
    (known,) = [each for each in session.status().contexts if each.key == recipe.key]
    return 0.0, known.load_s


def _measure_script_load(answer: Answer, place: Place, size: int) -> None:
    words = [sys.executable, "-c", _SCRIPT, str(place.model), device_name()]
    with answer.seconds("a script of its own: from its start to its end, s"):
        said = subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    imports_s, load_s = (float(word) for word in said.split()[-2:])
    answer["a script of its own: imports, s"] = imports_s
    answer["a script of its own: GB/s"] = size / load_s / 1e9


_SCRIPT = """
import sys, time; began = time.perf_counter()
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.ones(1, device=sys.argv[2]).sum().item()
AutoTokenizer.from_pretrained(sys.argv[1])
imported = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, device_map={"": sys.argv[2]})
if sys.argv[2] != "cpu": torch.cuda.synchronize()
print(imported - began, time.perf_counter() - imported)
"""


def _measure_peer_transfer(answer: Answer, place: Place) -> None:
    recipe = causal_lm(place.model, dtype="bfloat16", **device_memory("8 GB"))
    with place.session(pilots=2, policy="exclusive", own_scratch=True) as session:
        with answer.seconds("from a peer: two pilots are hot, s"):
            session.warm(recipe, 2).result(90)
        objects = session.status().objects
        answer["from a peer: bytes from the origin"] = sum(each.origin_bytes for each in objects)
        answer["from a peer: bytes from the peer"] = sum(each.peer_bytes for each in objects)
        rates = [
            int(peer) / max(float(seconds), 1e-3) / 1e9
            for log in Path(session.folder).glob("pilots/*/pilot.log")
            for _, peer, seconds in _CAME.findall(log.read_text())
            if int(peer)
        ]
        if rates:
            answer["from a peer: GB/s into the cache of the pilot"] = max(rates)
