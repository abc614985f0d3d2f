"""Compile an encoder's network for one batch shape with torch.compile. On a GPU, the result is a CUDA graph.

One thread compiles and computes, because a CUDA graph belongs to a thread. Other pilots find the compiler's stored
cache by its *form*, a name made from model, shape, device and versions.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from stoker.contexts import ambient
from stoker.contexts.folders import snapshot_folder
from stoker.contexts.snapshot import (
    create_snapshot_folder,
    find_received_snapshot,
    rename_damaged_snapshot,
    snapshot_creation_seconds,
)
from stoker.errors import ContextError
from stoker.units import show_seconds

log = logging.getLogger(__name__)

Made = TypeVar("Made")
Compile = Callable[[Path], Made]
_NOT_KEPT = "just compiled, and not kept"
_CACHE, _LOCKS = "cache", "locks"
_INDUCTOR_SETTINGS = {"compile_threads": 1, "cpp_cache_precompile_headers": False}
"""Settings of PyTorch's compiler that avoid idle compiler processes, and precompiled headers (150 MB each) in /tmp."""
_CACHE_FOLDER_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def compile_once(form: str, compile: Compile[Made]) -> tuple[Made, str]:
    """Call `compile` with a folder for its cache. Return its result, and a text about the origin of the code."""
    place = snapshot_folder() / form
    received = find_received_snapshot(place) if form else None
    if received and (had := _compile_with_snapshot(received[0], compile, place=place)):
        made, is_new = had
        told = f"another pilot compiled it in {show_seconds(received[1])}"
        return made, _offer_snapshot(place, "just compiled") if is_new else told
    for _ in range(2 if form else 0):
        kept = _compile_into_snapshot(place, compile)
        # The snapshot folder is not writable, so compile without it.
        if kept is None and snapshot_creation_seconds(place) is None:
            break
        had = (kept[0], True) if kept else _compile_with_snapshot(place, compile, place=place)
        if had is not None:
            return had[0], _offer_snapshot(place, "just compiled" if had[1] else "compiled earlier")
        rename_damaged_snapshot(place)
    with _temporary_folder() as folder:
        return compile(Path(folder)), _NOT_KEPT


_temporary_folder = partial(tempfile.TemporaryDirectory, prefix="stoker-compiled-", ignore_cleanup_errors=True)


def _offer_snapshot(place: Path, code_origin: str) -> str:
    made_s = snapshot_creation_seconds(place)
    if made_s is None:
        return _NOT_KEPT
    ambient.offer_snapshot(place.name, place, made_s=made_s)
    return f"{code_origin} in {show_seconds(made_s)}"


def _compile_into_snapshot(place: Path, compile: Compile[Made]) -> tuple[Made] | None:
    """Compile into a new snapshot. Return None without compiling if the snapshot exists or its folder is not
    writable.
    """
    found: list[Made] = []
    failed = False

    def write(draft: Path) -> None:
        nonlocal failed
        failed = True
        found.append(compile(draft / _CACHE))
        failed = False
        shutil.rmtree(draft / _CACHE / _LOCKS, ignore_errors=True)

    try:
        create_snapshot_folder(place, write, source="torch.compile")
    except OSError as error:
        if failed:
            raise
        log.warning("compiled code cannot be stored in %s: %s", place.parent, error)
    return (found[0],) if found else None


def _compile_with_snapshot(source: Path, compile: Compile[Made], *, place: Path) -> tuple[Made, bool] | None:
    """Run `compile` with a copy of the cache in `source`. Return its result, and True if a new cache replaced `place`;
    None if `compile` failed.
    """
    try:
        with _temporary_folder() as folder:
            cache = Path(folder, _CACHE)
            shutil.copytree(source / _CACHE, cache)
            before, began = _list_cache_files(cache), time.monotonic()
            made = compile(cache)
            is_new = _list_cache_files(cache) != before
            if is_new:
                _replace_snapshot(place, cache, made_s=time.monotonic() - began)
            return made, is_new
    except Exception as error:
        log.warning("the compiled code in %s cannot be used (%s); it is compiled again", source, error)
        return None


def _list_cache_files(cache: Path) -> set[str]:
    found = (path.relative_to(cache) for path in cache.rglob("*") if path.is_file())
    return {str(path) for path in found if path.parts[0] != _LOCKS}


def _replace_snapshot(place: Path, cache: Path, *, made_s: float) -> None:
    log.info("%s was compiled for another machine; it is replaced", place)
    shutil.rmtree(place, ignore_errors=True)

    def write(draft: Path) -> None:
        shutil.copytree(cache, draft / _CACHE, ignore=shutil.ignore_patterns(_LOCKS))

    try:
        create_snapshot_folder(place, write, source="torch.compile", made_s=made_s)
    except OSError as error:
        log.warning("compiled code cannot be stored in %s: %s", place.parent, error)


@contextlib.contextmanager
def redirect_inductor_cache(folder: Path) -> Iterator[None]:
    from torch._inductor import config, utils

    before = {name: os.environ.get(name) for name in _CACHE_FOLDER_VARIABLES}
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(zip(_CACHE_FOLDER_VARIABLES, (str(folder), str(folder / "triton")), strict=True))
    utils.clear_inductor_caches()
    try:
        with config.patch({name: value for name, value in _INDUCTOR_SETTINGS.items() if hasattr(config, name)}):
            yield
    finally:
        for name in _CACHE_FOLDER_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
        utils.clear_inductor_caches()


Answer = TypeVar("Answer")
Inputs = Callable[[], dict[str, torch.Tensor]]
"""Function that creates a network's inputs. It must run in the compiler's thread, in inference mode, because PyTorch
compiles different code for tensors created elsewhere.
"""
BACKEND: str | Callable[..., Any] = "inductor"
_FORMAT = 1
_RUNS_AFTER_COMPILING = 3
"""Number of runs after compiling: the first warms up a CUDA graph, the second records it, and the third replays it."""


class Compiler:
    """Compiles networks for inputs of one shape, and runs the networks in its own thread."""

    def __init__(self, device: str, *, form: str = "") -> None:
        self.code_origin = "not compiled"
        self._device = device
        self._code_name = form
        threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "compiled", initializer=torch.set_num_threads, initargs=(threads,))

    def run(self, work: Callable[[], Answer]) -> Answer:
        return self._thread.submit(work).result()

    def compile(self, network: Callable[..., Any], inputs: Inputs) -> Callable[..., Any]:
        def compile_in_thread(cache: Path) -> Callable[..., Any]:
            return self.run(lambda: self._compile_and_warm_up(network, inputs, cache))

        made, self.code_origin = compile_once(self._code_name, compile_in_thread)
        return made

    def close(self) -> None:
        self._thread.shutdown()

    def _compile_and_warm_up(self, network: Callable[..., Any], inputs: Inputs, cache: Path) -> Callable[..., Any]:
        mode = "reduce-overhead" if self._device.startswith("cuda") else None
        with redirect_inductor_cache(cache), torch.inference_mode():
            made: Callable[..., Any] = torch.compile(network, dynamic=False, mode=mode, backend=BACKEND)
            for _ in range(_RUNS_AFTER_COMPILING):
                made(**inputs())
            if mode is not None:
                torch.cuda.synchronize()
        return made


def should_compile(device: str, wanted: bool | str) -> bool:
    """True if the network should be compiled; `auto` compiles only on a GPU."""
    return wanted is True or (wanted == "auto" and not device.startswith("cpu"))


def compile_runtime(model: Any, wanted: bool | str) -> None:
    """Compile a runtime (an EncoderModel). A failure raises ContextError only if `wanted` is True."""
    if not should_compile(model.device, wanted):
        return
    compiler = Compiler(model.device, form=_compiled_code_name(model))
    began = time.monotonic()
    try:
        model.compile(compiler)
    except Exception as error:
        compiler.close()
        why = _short_error_text(error)
        if wanted is True:
            told = f"the runtime of {model.longest} tokens cannot be compiled on {model.device}: {why}"
            raise ContextError(f"{told}. With compiled='auto' it runs uncompiled") from error
        log.warning("%s, %s tokens: the runtime runs uncompiled: %s", model.name, model.longest, why)
    else:
        runtime = f"{model.longest} tokens of {model.name} on {model.device}"
        log.info("runtime of %s in %s: %s", runtime, show_seconds(time.monotonic() - began), compiler.code_origin)


def device_hardware_name(device: str) -> str:
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(torch.device(device)))
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _compiled_code_name(model: Any) -> str:
    kind, shape = device_hardware_name(model.device), model.runtime
    facts = [
        _FORMAT, model.source, str(model.model.dtype), shape, type(model.model).__name__, bool(model.labels), kind,
        torch.__version__, str(torch.version.cuda), sys.version_info[:2],
        0 if model.device.startswith("cuda") else torch.get_num_threads(),
    ]  # fmt: skip
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
    readable = re.sub(r"[^A-Za-z0-9.+_]+", "_", f"{torch.__version__}-{kind}")
    return f"compiled-{readable[:80]}-{digest}"


def _short_error_text(error: Exception) -> str:
    lines = [line.strip().rstrip(":.") for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines[:2] if not line.startswith("Set TORCH")]
    return ": ".join([type(error).__name__, *said])[:300]
