"""Delay slow imports in test files, which every pytest-xdist worker reads but only one worker runs."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
R = TypeVar("R")


class LazyModule:
    """A proxy that imports a module on first use. To modify the module, import it directly."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_mock_name":  # pytest reads these attributes of every name in a file
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def lazily(*names: str, needs: str = "") -> Any:
    """Return lazy modules; for one name, return the lazy module alone. Skip the test file if a package of `names` or
    `needs` is not installed.
    """
    for package in dict.fromkeys([*(name.partition(".")[0] for name in names), *needs.split()]):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed", allow_module_level=True)
    found = tuple(LazyModule(name) for name in names)
    return found if len(found) > 1 else found[0]


def without_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function in PyTorch's inference mode; the decorator `torch.inference_mode` would import PyTorch at once."""

    @functools.wraps(function)
    def run(*arguments: P.args, **more: P.kwargs) -> R:
        with importlib.import_module("torch").inference_mode():
            return function(*arguments, **more)

    return run
