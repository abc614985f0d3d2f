"""The Parsl kernel that a program has loaded, and its StokerExecutors."""

from __future__ import annotations

from collections.abc import Iterable

from parsl.dataflow.dflow import DataFlowKernel, DataFlowKernelLoader
from parsl.errors import NoDataFlowKernelError

from stoker.errors import ConfigError, SessionError
from stoker.manager.executor.executor import StokerExecutor

HOW_TO_LOAD = """  with stoker.load():              # this machine; or stoker.load("site.toml")
      ...                          # call it here"""


def loaded_kernel(name: str, *, inside: str = "") -> DataFlowKernel:
    """Parsl's loaded kernel. Raises SessionError, which names the app and shows how to load a site.

    `inside`: what to do instead in a function that is a call already.
    """
    try:
        return DataFlowKernelLoader.dfk()
    except NoDataFlowKernelError:
        raise SessionError(
            f"{name} was called before a site was loaded. Load one first:\n\n{HOW_TO_LOAD}\n\n"
            f"Inside of another call, {inside or f'call the function itself: {name}.function(...)'}"
        ) from None


def stoker_executors(kernel: DataFlowKernel, name: str) -> list[StokerExecutor]:
    """The loaded StokerExecutors. Raises SessionError if there is none."""
    found = [executor for executor in kernel.executors.values() if isinstance(executor, StokerExecutor)]
    if not found:
        labels = ", ".join(label for label in kernel.executors if label != "_parsl_internal")
        raise SessionError(
            f"{name} wants a StokerExecutor, but Parsl was loaded with {labels} only; add one to its Config:\n\n"
            "  Config(executors=[stoker.StokerExecutor()])\n"
        )
    return found


def check_labels(kernel: DataFlowKernel, labels: Iterable[str], *, name: str) -> None:
    """Raise ConfigError for a label of an executor that is not loaded, or no StokerExecutor."""
    loaded = [label for label in kernel.executors if label != "_parsl_internal"]
    for label in labels:
        if label not in loaded:
            raise ConfigError(
                f"{name}: executors: no executor {label!r} is loaded; there are {', '.join(loaded)}", key="executors"
            )
        if not isinstance(kernel.executors[label], StokerExecutor):
            kind = type(kernel.executors[label]).__name__
            raise ConfigError(
                f"{name}: executors: {label!r} is a {kind}, and a @stoker.app runs on StokerExecutors; for that one"
                f" write Parsl's @python_app(executors=[{label!r}])",
                key="executors",
            )
