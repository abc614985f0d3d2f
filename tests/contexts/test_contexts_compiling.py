from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lazily import lazily
from tiny_encoder import load_encoder as load

from stoker.contexts import ambient, encoder
from stoker.contexts.folders import snapshot_folder
from stoker.contexts.loading import load_context
from stoker.errors import ContextError

compiling = lazily("stoker.contexts.compiling", needs="torch transformers")
BACKEND = "stoker.contexts.compiling.BACKEND"
TEXTS = ["paris lies in france", "water boils", "paris"]


def fails(graph: Any, inputs: Any, **_: Any) -> Any:
    raise RuntimeError("no kernel for this device\nand many more lines")


class Backend:
    """A compiler that keeps the graph and records the threads that run it."""

    def __init__(self) -> None:
        self.graphs = 0
        self.threads: set[str] = set()

    def __call__(self, graph: Any, inputs: Any, **_: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*given: Any) -> Any:
            self.threads.add(threading.current_thread().name)
            return graph(*given)

        return run


def test_runtime_is_compiled_once_at_its_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend()
    monkeypatch.setattr(BACKEND, backend)
    model, plain = load(folder, length=8, batch=2, compiled=True), load(folder)
    assert model.is_compiled
    graphs = backend.graphs
    assert graphs > 0
    with ThreadPoolExecutor(4) as slots:
        for found in slots.map(model.embed, [TEXTS] * 8, timeout=60):
            assert np.allclose(found, plain.embed(TEXTS), atol=1e-5)
    assert backend.graphs == graphs
    assert backend.threads == {"compiled_0"}, "a CUDA graph belongs to the thread that recorded it"
    model.close()


def test_load_fails_if_a_required_compilation_is_impossible(folder, monkeypatch):
    monkeypatch.setattr(BACKEND, fails)
    with pytest.raises(ContextError, match=r"the runtime of 8 tokens cannot be compiled on cpu: .*no kernel for this"):
        load(folder, length=8, compiled=True)
    assert not list(snapshot_folder().glob("[!.]*[!k]")), "only a lock is kept of it"


@pytest.mark.long
def test_optional_compilation_that_fails_leaves_an_eager_runtime(folder, monkeypatch, caplog):
    monkeypatch.setattr(BACKEND, fails)
    # pretend that the device is a GPU
    monkeypatch.setattr("stoker.contexts.compiling.should_compile", lambda _, wanted: wanted == "auto")
    with caplog.at_level(logging.WARNING, logger="stoker"):
        model = load(folder, length=8)
    [record] = caplog.records
    assert "8 tokens: the runtime runs uncompiled: " in record.getMessage()
    assert "no kernel for this device" in record.getMessage()
    assert "many more lines" not in record.getMessage()
    assert not model.is_compiled
    assert np.allclose(model.embed(TEXTS), load(folder, length=8, compiled=False).embed(TEXTS), atol=1e-6)


def test_compilation_depends_on_the_device_and_the_option() -> None:
    wants = compiling.should_compile
    assert (wants("cuda:0", "auto"), wants("cpu", True)) == (True, True)
    assert (wants("cpu", "auto"), wants("cuda:0", False)) == (False, False)


@pytest.mark.gpu
def test_runtime_on_a_gpu_replays_its_graph_in_every_slot(folder: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    plain = load(folder)
    recipe = encoder(folder, length=8, batch=2)
    ambient.enter_library(device="cuda:0")
    model = load_context(recipe, {ref.name: ref.source for ref in recipe.objects})
    assert model.is_compiled
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with ThreadPoolExecutor(4) as slots:
        for found in slots.map(model.embed, [TEXTS] * 40, timeout=60):
            assert np.allclose(found, plain.embed(TEXTS), atol=1e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    model.close()


class Compile:
    """A compiler that compiles if the artifact folder is empty or comes from another machine."""

    def __init__(self, machine: str = "here") -> None:
        self.machine = machine
        self.anew = 0

    def __call__(self, cache: Path) -> str:
        cache.mkdir(parents=True, exist_ok=True)
        if not (cache / "kernel.so").exists():
            self.anew += 1
            (cache / "kernel.so").write_text("code")
            (cache / "locks").mkdir()
            (cache / "locks" / "a.lock").touch()
        elif (cache / "kernel.so").read_text() != "code":
            raise OSError("invalid ELF header")
        (cache / "locks").mkdir(exist_ok=True)
        if not (cache / self.machine).exists():
            self.anew += bool(self.machine != "here")
            (cache / self.machine).touch()
        return "made"


def test_compiled_artifact_is_kept_offered_and_used_unchanged(state: Path) -> None:
    compile, offers = Compile(), list[tuple[str, str, float]]()
    ambient.enter_library(offer=lambda *offer: offers.append(offer))
    made, how = compiling.compile_once("compiled-x", compile)
    assert (made, compile.anew) == ("made", 1)
    assert "just compiled" in how
    place = snapshot_folder() / "compiled-x"
    files = sorted(str(path.relative_to(place)) for path in place.rglob("*"))
    assert files == ["cache", "cache/here", "cache/kernel.so", "stoker-snapshot.json"]
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    made, how = compiling.compile_once("compiled-x", compile)
    assert (made, compile.anew) == ("made", 1)
    assert "compiled earlier" in how
    after = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    assert after == before, "files that were offered to other pilots do not change"
    assert [(form, folder) for form, folder, _ in offers] == [("compiled-x", str(place))] * 2


@pytest.mark.parametrize("from_peer", [False, True])
def test_artifact_compiled_for_another_machine_is_replaced(state: Path, tmp_path: Path, from_peer: bool) -> None:
    there = tmp_path / "object" if from_peer else snapshot_folder() / "compiled-x"
    same = Compile()
    same(there / "cache")
    (there / "stoker-snapshot.json").write_text(json.dumps({"made_s": 27.0}))
    offers: list[str] = []
    objects = {"compiled-x": str(there)} if from_peer else {}
    ambient.enter_library(objects=objects, offer=lambda form, *_: offers.append(form))
    if from_peer:
        assert compiling.compile_once("compiled-x", same) == ("made", "another pilot compiled it in 27 s")
        assert same.anew == 1
    compile = Compile("elsewhere")
    assert "just compiled" in compiling.compile_once("compiled-x", compile)[1]
    assert "compiled earlier" in compiling.compile_once("compiled-x", compile)[1]
    assert compile.anew == 1, "the model is compiled once, not at each load"
    assert (snapshot_folder() / "compiled-x" / "cache" / "elsewhere").exists()
    assert offers == ["compiled-x"] * 2


def test_damaged_artifact_is_compiled_again(state, caplog):
    compile = Compile()
    compiling.compile_once("compiled-x", compile)
    kernel = snapshot_folder() / "compiled-x" / "cache" / "kernel.so"
    kernel.write_text("co")
    made, how = compiling.compile_once("compiled-x", compile)
    assert (made, compile.anew) == ("made", 2)
    assert "just compiled" in how
    assert "invalid ELF header" in caplog.text
    assert kernel.read_text() == "code"


def test_unwritable_disk_loses_only_the_artifact(state, monkeypatch, caplog, tmp_path):
    (tmp_path / "a-file").touch()
    monkeypatch.setenv("STOKER_SNAPSHOTS", str(tmp_path / "a-file" / "below"))
    compile = Compile()
    assert compiling.compile_once("compiled-x", compile) == ("made", "just compiled, and not kept")
    assert compile.anew == 1
    assert "cannot be stored in" in caplog.text

    def fails(cache: Path) -> str:
        raise OSError("g++: command not found")

    with pytest.raises(OSError, match="command not found"):  # an error of a compiler is not a disk error
        compiling.compile_once("compiled-y", fails)
