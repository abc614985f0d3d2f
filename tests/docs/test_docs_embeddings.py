from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from docs.conftest import Place
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


@pytest.fixture(autouse=True)
def _model_and_texts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_encoder(place.folder / MODEL)
    texts = ["paris lies in france", "water boils"]
    (place.folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.chdir(place.folder)


@pytest.mark.slow
def test_documented_command_gives_each_row_a_vector(place: Place) -> None:
    command, _ = commands(PAGE)
    out = place.run(command, limit_s=LIMIT_S)
    (results,) = place.folder.glob("runs/embed-*/results.parquet")
    rows = pyarrow.parquet.read_table(results).to_pylist()
    assert [(row["id"], len(row["embedding"]), row["error"]) for row in rows] == [("1", 32, ""), ("2", 32, "")]
    assert json.loads((results.parent / "summary.json").read_text())["texts"] == 2
    assert "texts/s and" in out


def test_page_example_returns_unit_vector() -> None:
    from stoker.contexts.encoder_loading import load_encoder

    block, _ = programs(PAGE)
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(block.text, PAGE, "exec"), names)
    (vector,) = names["embed"].function(load_encoder(str(MODEL)), ["water boils"])
    assert sum(number * number for number in vector) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_documented_program_embeds_after_lengths_are_measured(place: Place) -> None:
    _, command = commands(PAGE)
    out = place.run(command, limit_s=LIMIT_S)
    assert "milliseconds of one text, padded to each length" in out
    assert "length=40" in out or "lengths=[" in out
    (site,) = [block.text for block in blocks(PAGE) if block.language == "toml"]
    (place.folder / "arlo.toml").write_text(site)
    _, block = programs(PAGE)
    assert place.run_program(block.text, limit_s=LIMIT_S).splitlines()[-2:] == ["1 texts", "2 texts"]
