from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from docs.pages import blocks, commands, programs
from tiny_encoder import write_tiny_encoder

PAGE = "docs/embeddings.md"
MODEL = Path("models", "all-MiniLM-L6-v2")
LIMIT_S = 150
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
        reason="needs torch and transformers",
    ),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_tiny_encoder(tmp_path / MODEL)
    texts = ["paris lies in france", "water boils"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stoker(command: str) -> str:
    return run([sys.executable, "-m", "stoker.manager.cli.main", *shlex.split(command)[1:]])


@pytest.mark.slow
def test_documented_command_gives_each_row_a_vector(place: Path) -> None:
    command, _ = commands(PAGE)
    out = stoker(command)
    (results,) = place.glob("runs/embed-*/results.parquet")
    rows = pyarrow.parquet.read_table(results).to_pylist()
    assert [(row["id"], len(row["embedding"]), row["error"]) for row in rows] == [("1", 32, ""), ("2", 32, "")]
    assert json.loads((results.parent / "summary.json").read_text())["texts"] == 2
    assert "texts/s and" in out


@pytest.mark.usefixtures("place")
def test_page_example_returns_unit_vector() -> None:
    from stoker.contexts.encoder_loading import load_encoder

    block, _ = programs(PAGE)
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(block.text, PAGE, "exec"), names)
    (vector,) = names["embed"].function(load_encoder(str(MODEL)), ["water boils"])
    assert sum(number * number for number in vector) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_lengths_are_measured_and_a_family_serves_them(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_HOME", str(place / "home"))
    _, command = commands(PAGE)
    out = stoker(command)
    assert "milliseconds of one text, padded to each length" in out
    assert "length=40" in out or "lengths=[" in out
    (site,) = [block.text for block in blocks(PAGE) if block.language == "toml"]
    (place / "arlo.toml").write_text(site)
    _, block = programs(PAGE)
    (place / "program.py").write_text(block.text)
    assert run([sys.executable, "program.py"]).splitlines()[-2:] == ["1 texts", "2 texts"]
