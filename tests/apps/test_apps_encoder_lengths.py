from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stoker.apps.encoder_lengths import run
from stoker.apps.encoder_lengths.functions import LengthsRequest, measure_lengths
from stoker.apps.encoder_lengths.run import (
    format_advice,
    format_disturbance_warning,
    format_length_table,
    format_length_warning,
    sample_texts,
)
from stoker.contexts import EncoderProfile, lengths_that_pay
from stoker.contexts.length_profiles import LengthTime
from stoker.errors import ConfigError


def profile(*seconds: float, **more: Any) -> EncoderProfile:
    given: dict[str, Any] = {
        "name": "", "dtype": "auto", "computed_dtype": "float32", "compiled": "auto", "is_compiled": True,
        "device": "NVIDIA H100", "threads": 1, "torch": "2.13.0", "repeats": 30, "measured_at": 1e9,
    }  # fmt: skip
    times = tuple(LengthTime(64 * (place + 1), each, 2e-5) for place, each in enumerate(seconds))
    return EncoderProfile(lengths=times, **given | more)


# ---- output


def test_length_table_has_a_row_for_each_length() -> None:
    found = [line.split() for line in format_length_table(profile(0.001, 0.002, 0.00195), [])]
    assert found == [
        ["tokens", "ms", "spread", "more"], ["64", "1.00", "0.02"], ["128", "2.00", "0.02", "+1.00"],
        ["192", "1.95", "0.02", "-0.05"],
    ]  # fmt: skip
    with_texts = [line.split() for line in format_length_table(profile(0.001, 0.002), [1, 64, 65, 400])]
    assert [row[-1] for row in with_texts] == ["texts", "50.0%", "25.0%"]


def test_advice_has_a_line_of_code_with_the_useful_lengths() -> None:
    stairs = profile(*(0.001 * step for step in range(1, 5)), dtype="float16", compiled=True)
    lines = format_advice("models/m", stairs, lengths_that_pay(stairs))
    assert "less time than the longest alone" in lines[0]
    assert lines[2].strip() == (
        "encoder_family('models/m', lengths=[64, 128, 192, 256], dtype='float16', compiled=True)"
    )
    assert len(lines) == 3


def test_advice_is_one_runtime_if_all_lengths_take_equal_time() -> None:
    flat = profile(0.005, 0.005, 0.005, is_compiled=False)
    lines = format_advice("models/m", flat, lengths_that_pay(flat))
    assert lines[0] == "one runtime is enough, of 192 tokens: shorter runtimes would save less than 5%"
    assert lines[2].strip() == "encoder('models/m', length=192)"
    assert "nothing was compiled on this device" in lines[-1]


def test_texts_longer_than_every_runtime_are_counted() -> None:
    assert format_length_warning(profile(0.001, 0.002), [1, 128, 129]).startswith(
        "1 of 3 texts have more than 128 tokens"
    )
    assert format_length_warning(profile(0.001, 0.002), [1, 128]) == ""


def test_unsteady_times_are_reported() -> None:
    assert format_disturbance_warning(profile(0.001, 0.002)) == ""
    assert "differ by 10% from their median" in format_disturbance_warning(profile(0.0002, 0.0002))


# ---- a user's texts


def test_text_sample_is_drawn_uniformly_from_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [json.dumps({"said": f"text {number}"}) for number in range(3000)]
    (tmp_path / "t.jsonl").write_text("\n".join([*rows, '{"said": null}', '{"said": ""}']))
    monkeypatch.setattr(run, "SAMPLE", 600)
    found = sample_texts(tmp_path / "t.jsonl", "said")
    numbers = [int(text.split()[1]) for text in found]
    assert len(set(numbers)) == 600
    assert abs(sum(numbers) / 600 - 1500) < 5 * 866 / math.sqrt(600)
    assert sample_texts(tmp_path / "t.jsonl", "said") == found
    monkeypatch.setattr(run, "SAMPLE", 4000)
    assert len(sample_texts(tmp_path / "t.jsonl", "said")) == 3000


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ('{"other": "x"}', r"line 1: text must be text, and is missing \(the row has other\); name another .* --text"),
        ('{"text": "x"}\n{"text": 7}', "line 2: text must be text, and is 7"),
        ('{"text": null}', "no row has a text in text"),
    ],
)
def test_rows_without_a_text_are_named(tmp_path: Path, lines: str, says: str) -> None:
    (tmp_path / "t.jsonl").write_text(lines)
    with pytest.raises(ConfigError, match=says):
        sample_texts(tmp_path / "t.jsonl", "text")


# ---- code on a pilot


def test_measurement_call_passes_the_command_options_to_the_model() -> None:
    class Model:
        def profile_lengths(self, **asked: Any) -> Any:
            asked.pop("told")(1, 2)
            return asked

    found = measure_lengths.function(Model(), LengthsRequest(step=32, dtype="float16", compiled=True))
    assert found == {"step": 32, "dtype": "float16", "compiled": True}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "encoder_lengths needs an encoder: --model PATH"),
        (["--model", "./nowhere"], "there is no model at ./nowhere"),
        (["--model", "tiny", "--text", "said"], "--text names a column of --texts FILE, which is missing"),
        (["--model", "tiny", "--texts", "t.jsonl", "--text", "n"], "n must be text, and is 1; name another column"),
        (["--model", "tiny", "--texts", "t.jsonl"], "the tokenizer of tiny cannot be read"),
    ],
)
def test_encoder_lengths_command_explains_unusable_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    from click.testing import CliRunner

    from stoker.apps.encoder_lengths.cli import command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "home"))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    (tmp_path / "t.jsonl").write_text('{"text": "paris", "n": 1}\n')
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code != 0
    assert said in result.output + str(result.exception or "")
