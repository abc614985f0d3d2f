from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from tiny_encoder import write_tiny_encoder

from stoker.apps.common.data_rows import DataItem
from stoker.apps.embed.functions import EmbeddedTexts, EmbedRequest, embed_texts
from stoker.apps.embed.run import format_first_error, make_log_records, write_npy, write_parquet
from stoker.errors import StokerError

VECTORS = {"a": [1.0, 2.0], "c": [-0.5, 0.25]}


def items(*ids: str) -> list[DataItem]:
    return [DataItem(id=id, fields={}, place=f"line {number}") for number, id in enumerate(ids, 1)]


def records() -> tuple[dict[Any, Any], dict[Any, Any]]:
    vectors = [np.float32(VECTORS["a"]).tobytes(), b"", np.float32(VECTORS["c"]).tobytes()]
    made, failed = make_log_records(("a", "b", "c"), EmbeddedTexts(0, vectors, ["", "too long", ""], 9, 0.1))
    return {(each["id"],): each for each in made}, {(each["id"],): each for each in failed}


def test_parquet_file_has_a_row_for_each_text_in_order(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x", items("c", "b", "a"), *records())
    assert pyarrow.parquet.read_table(tmp_path / "x").to_pylist() == [
        {"id": "c", "embedding": VECTORS["c"], "error": ""},
        {"id": "b", "embedding": None, "error": "too long"},
        {"id": "a", "embedding": VECTORS["a"], "error": ""},
    ]


def test_numpy_array_has_nan_for_a_text_without_a_vector(tmp_path: Path) -> None:
    write_npy(tmp_path / "x", items("b", "c", "a", "b"), *records(), rows=4)
    found = np.load(tmp_path / "x")
    assert (found.shape, found.dtype, found.flags["C_CONTIGUOUS"]) == ((4, 2), np.float32, True)
    assert np.isnan(found[[0, 3]]).all()
    assert found[1:3].tolist() == [VECTORS["c"], VECTORS["a"]]


def test_error_names_the_line_of_the_first_text_without_vector() -> None:
    _, failed = records()
    assert format_first_error(items("a", "b", "c"), failed, file=Path("t.csv")) == "t.csv: line 2: row b: too long"
    assert format_first_error(items("a", "c"), failed, file=Path("t.csv")) == ""


def test_missing_vectors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StokerError, match="there is no result for row z"):
        write_parquet(tmp_path / "x", items("z"), *records())


class Letters:
    """An embedder that counts letters and refuses empty texts."""

    def embed_array(self, texts: list[str], **_: Any) -> tuple[Any, int]:
        for number, text in enumerate(texts):
            if not text:
                raise ValueError(f"text {number} is empty; the model needs at least one token")
        return np.float32([[len(text), text.count("a")] for text in texts]), sum(map(len, texts))


def test_other_texts_have_vectors_if_a_text_is_rejected() -> None:
    found = embed_texts.function(Letters(), EmbedRequest(number=7, texts=("banana", "", "kiwi")))
    assert (found.number, found.tokens) == (7, 10)
    assert [np.frombuffer(vector, "<f4").tolist() for vector in found.vectors] == [[6.0, 3.0], [], [4.0, 0.0]]
    assert found.errors == ["", "the row has no text", ""]


@pytest.mark.parametrize("cells", [[None, "a"], ["", "a"], ["  \n", "a"], [float("nan"), "a"]])
def test_empty_cell_is_not_embedded(tmp_path: Path, cells: list[Any]) -> None:
    from stoker.apps.common.data_rows import check_rows
    from stoker.apps.embed.options import EmbedOptions
    from stoker.apps.embed.run import _make_missing_requests

    if isinstance(cells[0], float):
        pyarrow.parquet.write_table(pyarrow.table({"text": [cells[0]]}), tmp_path / "t.parquet")
        path, expected = tmp_path / "t.parquet", ("",)
    else:
        path, expected = tmp_path / "t.jsonl", ("", "a")
        path.write_text("".join(json.dumps({"text": cell}) + "\n" for cell in cells))
    rows = check_rows(path, column="", wanted={"--text": ("text",)}, texts=True)
    [request] = _make_missing_requests(EmbedOptions(text="text"), rows, {}, sent={})  # type: ignore[arg-type]
    assert request.texts == expected
    [note] = rows.notes
    assert "text is empty in 1 of" in note


# ---- real runs


needs_torch = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
    reason="needs torch and transformers",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "small"
    write_tiny_encoder(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["embed"], "embed needs a file of texts: stoker run embed FILE"),
        (["embed", "t.csv"], "embed needs an encoder: --model PATH"),
        (["embed", "t.csv", "--model", "{model}"], "t.csv: line 2: text is missing, and --text needs it (the row has"),
        (
            ["embed", "t.jsonl", "--model", "{model}", "--text", "n"],
            "n must be text, and is 1; name another column with --text",
        ),
        (["embed", "t.csv", "--model", "./nowhere", "--text", "said"], "nowhere"),
    ],
)
@needs_torch
def test_embed_command_explains_unusable_input(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    from click.testing import CliRunner

    from stoker.apps.embed.cli import command

    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("said,n\nparis lies in france,1\n")
    (tmp_path / "t.jsonl").write_text('{"said": "paris lies in france", "n": 1}\n')
    monkeypatch.setattr("stoker.apps.embed.run._run_missing_calls", _reads_requests)
    result = CliRunner().invoke(command, [each.format(model=model) for each in arguments[1:]])
    assert result.exit_code != 0
    assert said in result.output + str(result.exception or "")


def _reads_requests(work: Any, options: Any, recipe: Any, rows: Any) -> None:
    from stoker.apps.embed.run import _make_missing_requests

    list(_make_missing_requests(options, rows, work.log, sent={}))
