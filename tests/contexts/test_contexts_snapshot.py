from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lazily import lazily

from stoker.contexts.folders import snapshot_folder

snapshot = lazily("stoker.contexts.snapshot", needs="torch transformers")


class Part:
    """A model or tokenizer with `save_pretrained`."""

    def __init__(self, name: str, text: str = "weights") -> None:
        self.name, self.text, self.config, self.hf_quantizer = name, text, Config(), "a quantizer"

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / self.name).write_text(self.text)


class Config:
    quantization_config = None

    def __init__(self) -> None:
        self.quantization_config = "gguf"


def parts() -> tuple[Any, Any]:
    return Part("model"), Part("tokenizer")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "snapshots" / "file-abc-float32-1"


def test_snapshot_is_made_once_and_reported(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def load() -> tuple[Any, Any]:
        calls.append(1)
        return parts()

    with caplog.at_level(logging.INFO):
        assert snapshot.make_snapshot(place, load, source="models/m.gguf")
        assert not snapshot.make_snapshot(place, load, source="models/m.gguf")
    assert calls == [1]
    assert "made the snapshot" in caplog.text
    assert sorted(path.name for path in place.iterdir()) == ["model", "stoker-snapshot.json", "tokenizer"]
    assert json.loads((place / "stoker-snapshot.json").read_text())["source"] == "models/m.gguf"


class Full(Part):
    def save_pretrained(self, folder: Path) -> None:
        super().save_pretrained(folder)
        raise OSError(28, os.strerror(28))


def no_architecture() -> tuple[Any, Any]:
    raise RuntimeError("no such architecture")


@pytest.mark.parametrize("load", [no_architecture, lambda: (Part("model"), Full("tokenizer"))])
def test_failed_load_or_full_disk_leaves_no_snapshot(place: Path, load: Any) -> None:
    with pytest.raises((RuntimeError, OSError), match=r"no such architecture|No space"):
        snapshot.make_snapshot(place, load, source="m")
    assert [path.name for path in place.parent.iterdir()] == [place.name + ".lock"]
    assert snapshot.make_snapshot(place, parts, source="m")


_KILLED = """
import os, sys
from pathlib import Path
from stoker.contexts import snapshot
class Part:
    class config: pass
    def save_pretrained(self, folder):
        Path(folder, "half").write_text("half")
        os.kill(os.getpid(), 9)
snapshot.make_snapshot(Path(sys.argv[1]), lambda: (Part(), Part()), source="m")
"""


def test_incomplete_snapshot_of_a_dead_process_is_removed(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED, str(place)], timeout=120, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    drafts = [path for path in place.parent.iterdir() if path.is_dir()]
    assert len(drafts) == 1
    assert not place.exists()
    with caplog.at_level(logging.WARNING):
        assert snapshot.make_snapshot(place, parts, source="m")
    assert "which a dead process left" in caplog.text
    assert [path for path in place.parent.iterdir() if path.is_dir()] == [place]


_RACER = """
import sys
from pathlib import Path
from stoker.contexts import snapshot
class Part:
    class config: pass
    def save_pretrained(self, folder):
        Path(folder, "part").write_text("x")
print("ready", flush=True)
sys.stdin.readline()
print(snapshot.make_snapshot(Path(sys.argv[1]), lambda: (Part(), Part()), source="m"))
"""


def test_several_libraries_convert_a_model_once(place: Path) -> None:
    command = [sys.executable, "-c", _RACER, str(place)]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
    assert sorted(racer.communicate(timeout=60)[0].strip() for racer in racers) == ["False", "True"]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let models load from the files of a `Part` instead of with Transformers. Return the list of read paths."""
    seen: list[str] = []

    def read(path: str, *, dtype: Any, devices: tuple[str, ...]) -> tuple[Any, Any]:
        seen.append(path)
        if path.endswith(".gguf"):
            return parts()
        text = (Path(path) / "model").read_text()
        if text != "weights":
            raise ValueError("the weights are damaged")
        return Part("model", text), Part("tokenizer")

    monkeypatch.setattr("stoker.contexts.snapshot._load_with_transformers", read)
    return seen


def through(source: Path) -> str:
    _, how = snapshot._load_through_snapshot(str(source), dtype="float32", devices=("cpu",), name="")
    return how


def test_damaged_snapshot_is_made_again(tmp_path: Path, loads: list[str], caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(b"gguf")
    assert "just made" in through(source)
    assert "made earlier" in through(source)
    place = next(path for path in snapshot_folder().iterdir() if path.is_dir())
    (place / "model").write_text("wei")
    with caplog.at_level(logging.WARNING):
        assert "just made" in through(source)
    assert "made again" in caplog.text
    assert "made earlier" in through(source)
    source.write_bytes(b"other")
    assert "just made" in through(source), "other content has another snapshot"


def test_model_loads_without_a_snapshot_if_none_can_be_written(tmp_path, loads, monkeypatch, caplog):
    source = tmp_path / "m.gguf"
    source.write_bytes(b"gguf")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STOKER_SNAPSHOTS", str(tmp_path / "file" / "snapshots"))
    with caplog.at_level(logging.WARNING):
        assert through(source) == "without a snapshot"
    assert "the model is loaded without one" in caplog.text
    assert loads == [str(source)]


def test_end_tokens_named_by_a_gguf_file_end_texts() -> None:
    """Transformers 5.17 reads a wrong end token from a GGUF file."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<begin>": 0, "<end>": 1, "a": 2}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<begin>", eos_token="<begin>", pad_token="a"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    named = transformers.PretrainedConfig(bos_token_id=0, eos_token_id=1, pad_token_id=99)  # token 99 does not exist
    snapshot._correct_special_tokens(tokenizer, named)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<begin>", "<end>", "a")
    assert tokenizer.eos_token_id == 1
