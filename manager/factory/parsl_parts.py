"""Import Parsl's providers without the other parts of Parsl.

`import parsl` takes seconds on a busy login node. After `import_in_parts`, submodules of `parsl` are imported
separately. Access to any other attribute imports the whole package.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any


class _Parts(ModuleType):
    """The package `parsl` before its complete import."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        with _lock:
            if type(self) is _Parts:
                object.__setattr__(self, "__class__", ModuleType)
                assert self.__spec__ is not None
                assert self.__spec__.loader is not None
                self.__spec__.loader.exec_module(self)
        return getattr(self, name)


_lock = threading.RLock()


def import_in_parts() -> None:
    """Prepare partial imports, unless Parsl is already imported or missing."""
    spec = importlib.util.find_spec("parsl") if "parsl" not in sys.modules else None
    if spec is None or spec.loader is None or spec.submodule_search_locations is None:
        return
    package = _Parts("parsl", "Parsl, imported in parts.")
    package.__spec__, package.__loader__, package.__file__ = spec, spec.loader, spec.origin
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["parsl"] = package
