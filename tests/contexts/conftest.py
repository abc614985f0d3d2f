"""Give every test a private state folder, and run PyTorch on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_encoder import write_tiny_encoder

from stoker.contexts import ambient


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "state"
    monkeypatch.setenv("STOKER_HOME", str(folder))
    monkeypatch.delenv("STOKER_SNAPSHOTS", raising=False)
    yield folder
    ambient.leave_call_scope()
    ambient.leave_library()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="Transformers is not installed")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="Transformers is not installed")
    return write_tiny_encoder(tmp_path_factory.mktemp("models") / "small")
