"""Runtimes that are compiled: the network of an encoder for one shape of batch, by torch.compile; on a GPU as CUDA
graphs (mode `reduce-overhead`).

All of a runtime is compiled, and then computed, in one thread of its own: a CUDA graph belongs to the thread that
recorded it, and code for a CPU is compiled for a number of threads, which others would change (`core_share.py`). So
nothing is compiled anew while calls run.

What was compiled is kept as an object, so that other pilots need not compile (`compiled_artifacts.py`).
"""

from __future__ import annotations

import hashlib
import logging
import platform
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from stoker.contexts import compiled_artifacts
from stoker.contexts.encoder_inputs import RuntimeShape
from stoker.errors import ContextError
from stoker.units import show_seconds

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Inputs = Callable[[], dict[str, torch.Tensor]]
"""Makes what a network is given. It is asked where the network computes: a tensor that was made elsewhere (outside of
inference mode) has other code compiled for it."""
BACKEND: str | Callable[..., Any] = "inductor"
_ADVICE = "Set TORCH"
"""How PyTorch begins to say where its developers find more."""
_FORMAT = 1
_RUNS = 3
"""A CUDA graph is warmed up in the first run and recorded in the second; the third runs it."""


class Runtime(Protocol):
    """What is compiled: an `EncoderModel` that is a runtime. `source` says which model it is, the same everywhere;
    `longest` is its length in tokens."""

    name: str
    source: str
    model: Any
    longest: int
    labels: list[str]
    runtime: RuntimeShape | None

    @property
    def device(self) -> str:
        """As PyTorch names it."""

    def compile(self, compiler: Compiler) -> None:
        """Have its network compiled, and compute in the compiler's thread."""


class Compiler:
    """Compiles networks for inputs of one shape, and runs them in its thread. `form` names what it compiles, the same
    everywhere; empty: nothing is kept."""

    def __init__(self, device: str, *, form: str = "") -> None:
        self.how = "not compiled"
        """How the last network came about, for people."""
        self._device = device
        self._form = form
        threads = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "compiled", initializer=torch.set_num_threads, initargs=(threads,))

    def run(self, work: Callable[[], Answer]) -> Answer:
        """What `work` returns, computed in the compiler's thread. Raises what it raises."""
        return self._thread.submit(work).result()

    def compile(self, network: Callable[..., Any], inputs: Inputs) -> Callable[..., Any]:
        """The network for inputs of this shape, compiled and run. Raises what torch.compile raises."""

        def make(cache: Path) -> Callable[..., Any]:
            return self.run(lambda: self._compiled(network, inputs, cache))

        made, self.how = compiled_artifacts.compile_once(self._form, make)
        return made

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _compiled(self, network: Callable[..., Any], inputs: Inputs, cache: Path) -> Callable[..., Any]:
        mode = "reduce-overhead" if self._device.startswith("cuda") else None
        with compiled_artifacts.inductor_cache(cache), torch.inference_mode():
            made: Callable[..., Any] = torch.compile(network, dynamic=False, mode=mode, backend=BACKEND)
            for _ in range(_RUNS):
                made(**inputs())
            if mode is not None:
                torch.cuda.synchronize()
        return made


def wants_compiling(device: str, wanted: bool | str) -> bool:
    """True where a runtime is compiled: `auto` means on a GPU."""
    return wanted is True or (wanted == "auto" and not device.startswith("cpu"))


def compile_runtime(model: Runtime, wanted: bool | str) -> None:
    """Have a runtime compiled, if that is wanted.

    A runtime that cannot be compiled computes as it is, with a warning. Raises ContextError if it had to be compiled
    (True).
    """
    if not wants_compiling(model.device, wanted):
        return
    compiler = Compiler(model.device, form=_form(model))
    began = time.monotonic()
    try:
        model.compile(compiler)
    except Exception as error:
        compiler.close()
        why = _short(error)
        if wanted is True:
            raise ContextError(
                f"the runtime of {model.longest} tokens cannot be compiled on {model.device}: {why}. Other runtimes"
                " serve its texts; with compiled='auto' it computes as it is",
            ) from error
        log.warning("%s, %s tokens: computed as it is, not compiled: %s", model.name, model.longest, why)
    else:
        took = show_seconds(time.monotonic() - began)
        log.info(
            "runtime of %s tokens of %s on %s in %s: %s", model.longest, model.name, model.device, took, compiler.how
        )


def device_kind(device: str) -> str:
    """The kind of a device, as far as code is compiled for it: a GPU's name, or a CPU's instruction set."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(torch.device(device)))
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _form(model: Runtime) -> str:
    """A name for what is compiled: with the version of PyTorch, the kind of device, and a digest of all else."""
    kind, shape = device_kind(model.device), model.runtime
    facts = [
        _FORMAT, model.source, str(model.model.dtype), shape, type(model.model).__name__, bool(model.labels), kind,
        torch.__version__, str(torch.version.cuda), sys.version_info[:2],
        0 if model.device.startswith("cuda") else torch.get_num_threads(),
    ]  # fmt: skip
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
    readable = re.sub(r"[^A-Za-z0-9.+_]+", "_", f"{torch.__version__}-{kind}")
    return f"compiled-{readable[:80]}-{digest}"


def _short(error: Exception) -> str:
    """The kind of an error and its first two lines: of PyTorch's, the first names the backend, the second says why."""
    lines = [line.strip().rstrip(":.") for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines[:2] if not line.startswith(_ADVICE)]
    return ": ".join([type(error).__name__, *said])[:300]
