"""Two language models on one device: their engines take turns, and each writes what it writes alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

import stoker
from stoker.manager.protocol.ids import LibraryId

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
    reason="needs torch and transformers",
)


@stoker.app
def write(model, prompt):
    """A text, and the libraries whose engines stand on the board of turns that this library has mapped."""
    from stoker.pilot.library.turn_board import TurnBoard

    text = model.generate([prompt], max_new_tokens=60)[0]
    [board] = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("/turns")}
    return text, tuple(row.library for row in TurnBoard(Path(board)).rows())


def test_two_engines_on_one_device_stand_on_one_board_and_write_what_they_write_alone(tmp_path: Path) -> None:
    for name, longest in (("one", "2048"), ("two", "1024")):
        write_tiny_model(tmp_path / name)
        config = tmp_path / name / "config.json"
        config.write_text(config.read_text().replace("2048", longest))  # models that are alike are one context
    models = [stoker.causal_lm(str(tmp_path / name), memory="600 MB") for name in ("one", "two")]
    prompts = [f"Number {number} is" for number in range(6)]
    with stoker.load(run_dir=str(tmp_path / "runs")):
        alone = [write.with_options(context=model)("Number 0 is").result()[0] for model in models]
        asked = [
            [write.with_options(context=model)(prompt) for prompt in prompts for _ in range(3)] for model in models
        ]
        found = [[future.result() for future in each] for each in asked]
    for text, each in zip(alone, found, strict=True):
        assert each[0][0] == text
        assert len({one[0] for one in each}) == len(prompts)
    boards: set[tuple[LibraryId, ...]] = {one[1] for each in found for one in each}
    assert max(map(len, boards)) == 2
