"""What modules do when the zygote imports them that a fork cannot bear: start threads, or ask for GPUs.

A fork copies only the thread that forks: a lock that another thread held is never released in the child. So a zygote
with threads starts libraries in new interpreters, unless the threads are known to be harmless.

The zygote sees no GPU: asking CUDA would initialise it, and no fork of such a process can use it. A module that asks
during its import hears that there is none, and may keep that answer (`DEVICE = "cuda" if torch.cuda.is_available() else
"cpu"`). Libraries with GPUs then start in a new interpreter, where the answer is right.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# ---- threads


HARMLESS = frozenset({"jemalloc_bg_thd"})
"""jemalloc's thread (in pyarrow, which pandas imports) returns memory; a child works without it."""
_NAMED_S = 0.05
"""A thread names itself a moment after it has started."""


class ImportedThreads:
    """Looks at this process's threads after each import."""

    def __init__(self) -> None:
        self._started = dict.fromkeys(_threads(), "what came before the imports")

    def attribute_to(self, module: str) -> None:
        """Threads that were not here before are of this module, which was imported just now."""
        for thread in _threads():
            self._started.setdefault(thread, module)

    def harmful(self) -> dict[str, str]:
        """The names of this process's threads, by the module that started them, except the main thread and harmless
        ones."""
        found = self._harmful()
        if found:
            time.sleep(_NAMED_S)
            found = self._harmful()
        return found

    def _harmful(self) -> dict[str, str]:
        names: dict[str, list[str]] = {}
        for thread, name in _threads().items():
            if thread != os.getpid() and name not in HARMLESS:
                names.setdefault(self._started.get(thread, "something later"), []).append(name)
        return {module: ", ".join(sorted(each)) for module, each in names.items()}


def _threads() -> dict[int, str]:
    found = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/comm") as file:
                found[int(thread)] = file.read().strip()
        except OSError:  # it has ended
            continue
    return found


# ---- questions for GPUs


_MODULE = "torch.cuda"
_QUESTIONS = ("is_available", "device_count", "init")


class Listener(MetaPathFinder):
    """Listens from `start` to `stop`. `asked`: whether a question was put."""

    def __init__(self) -> None:
        self.asked = False
        self._plain: dict[str, Callable[..., Any]] = {}

    def start(self) -> None:
        """Listen to `torch.cuda`, as soon as it is imported."""
        if _MODULE in sys.modules:
            self._listen(sys.modules[_MODULE])
        else:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Listen no more: PyTorch is as it was."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        module = sys.modules.get(_MODULE)
        for name, plain in self._plain.items():
            setattr(module, name, plain)
        self._plain.clear()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as others do, with a loader that reports it."""
        del path, target
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._listen)
        return spec

    def _listen(self, module: ModuleType) -> None:
        for name in _QUESTIONS:
            plain = getattr(module, name, None)
            if callable(plain):
                self._plain[name] = plain
                setattr(module, name, self._noting(plain))

    def _noting(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def ask(*args: Any, **kwargs: Any) -> Any:
            self.asked = True
            return plain(*args, **kwargs)

        return ask


class _Loader(Loader):
    """A loader that calls a function after it has loaded the module."""

    def __init__(self, inner: Any, then: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the other."""
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Load the module, then call the function."""
        self._inner.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
