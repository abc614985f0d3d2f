"""Compare the start of a library that imports torch and transformers: forked from the zygote, or a new interpreter.

The time is from the request until the first tensor operation of the loader. Both starts alternate on one core, with
the code of the pilot.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import stoker
from benchmarks.harness import in_turns, need, ratios, until
from benchmarks.tables import Bar, Line, Table
from stoker.contexts.recipe import Recipe
from stoker.pilot.agent.process import LibraryProcess, Zygotes
from stoker.pilot.library import connection
from stoker.pilot.zygote.client import Exited, Fork, Preloaded, Zygote
from stoker.protocol.ids import DeviceId, LibraryId, PilotId
from stoker.protocol.to_agent import Loaded, LoadFailed
from stoker.protocol.to_library import Load

WAIT_S = 120.0
T = TypeVar("T")


@stoker.context
def uses_torch_and_transformers(stamp: str) -> str:
    import time

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    total = float(torch.ones(8, 8).sum())
    now = time.monotonic()
    with open(stamp, "w") as file:
        file.write(repr(now))
    return f"{AutoModelForCausalLM.__name__} {AutoTokenizer.__name__} {total}"


class Starter:
    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.zygotes = Zygotes(logs=folder, scratch=folder / "scratch")
        self.core = min(os.sched_getaffinity(0))

    def preload(self, recipe: Recipe) -> float:
        """Start both zygotes. Return the seconds until the zygote with `recipe.preload` is ready."""
        seconds = []
        for modules in (recipe.preload, ()):
            started = time.monotonic()
            zygote, _ = self.zygotes.get_or_start(modules)
            ready = _wait_for(zygote, Preloaded)
            if ready.failed or ready.threads:
                raise RuntimeError(f"the zygote is not fit to fork: {ready}")
            seconds.append(time.monotonic() - started)
        return seconds[0]

    def request(self, *, fresh: bool) -> float:
        self.count += 1
        number, folder = LibraryId(self.count), self.folder / f"library-{self.count}"
        folder.mkdir()
        stamp, log = folder / "stamp", str(folder / "log")
        recipe = uses_torch_and_transformers(str(stamp))
        began = time.monotonic()
        library = LibraryProcess(number, folder=folder, log=log)
        theirs = library.make_socket_pair()
        zygote, _ = self.zygotes.get_or_start(() if fresh else recipe.preload)
        fork = Fork(
            library=number, entry="stoker.pilot.library.main:serve", log=log, folder=str(folder),
            environment={"STOKER_LIBRARY": str(number), "STOKER_PILOT": "bench"}, cores=(self.core,), threads=1,
            fresh=fresh,
        )  # fmt: skip
        zygote.fork_library(fork, theirs)
        told = connection.LibrarySettings(
            pilot=PilotId("bench"), library=number, folder=str(folder), log=log, objects=str(folder), search_path=()
        )
        library.send_bytes(connection.pack_frame_body(connection.encode_settings(told)))
        library.send_messages([Load(recipe=recipe, devices=(DeviceId("cpu:0"),), objects={})])
        _wait_until_loaded(library, log)
        library.close()
        _wait_for(zygote, Exited)
        return float(stamp.read_text()) - began


def _wait_until_loaded(library: LibraryProcess, log: str) -> None:
    def is_loaded() -> bool:
        messages, here = library.receive_messages()
        if failed := [message for message in messages if isinstance(message, LoadFailed)]:
            raise RuntimeError(f"the loader failed: {failed[0].failure.message}")
        loaded = any(isinstance(message, Loaded) for message in messages)
        if not here and not loaded:
            raise RuntimeError(f"the library did not load:\n{Path(log).read_text()[-2000:]}")
        return loaded

    until(is_loaded, WAIT_S, "the load of the library", every_s=0.002)


def _wait_for(zygote: Zygote, kind: type[T]) -> T:
    def said() -> list[T]:
        messages = zygote.receive_messages()
        if messages is None:
            raise RuntimeError(f"the zygote ended:\n{zygote.log.read_text()[-2000:]}")
        return [message for message in messages if isinstance(message, kind)]

    return until(said, WAIT_S, f"{kind.__name__} of the zygote", every_s=0.002)[0]


def measure(say: Callable[[str], None], *, quick: bool = False) -> Table:
    need("torch", "transformers")
    with tempfile.TemporaryDirectory(prefix="zygote-") as place:
        starter = Starter(Path(place))
        sides: dict[str, Callable[[], float]] = {
            "zygote": lambda: starter.request(fresh=False),
            "fresh interpreter": lambda: starter.request(fresh=True),
        }
        try:
            imported_s = starter.preload(uses_torch_and_transformers(""))
            if not quick:
                for side in sides.values():
                    side()
            found = in_turns(sides, 1 if quick else 11, say)
        finally:
            starter.zygotes.close()
    cells = {**found, "fresh / zygote": ratios(found["fresh interpreter"], found["zygote"])}
    line = Line(what="seconds", cells=cells, bar=Bar(at_least=20, repeats=7), digits=3, last_digits=0)
    note = f"The zygote itself was ready {imported_s:.1f} s after its start; every library of the pilot forks from it."
    return Table(lines=[line], notes=[note])
