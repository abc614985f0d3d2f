from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.contexts import context, payload_layout, payloads


class Touches:
    """An object whose pickle runs a command when loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def packed(*args: Any, **kwargs: Any) -> bytes:
    return payloads.dumps((args, kwargs))


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (packed(3), "(3)"),
        (packed(), "()"),
        (packed("Paris is in France, and Rome in Italy", n=3), "('Paris is in France, and Rome in…', n=3)"),
        (packed(["a", "b", "c"], {"k": [1]}), "(['a', 'b', … 3 items], {'k': [1]})"),
        (packed((1,), set(), b"abc", None, 1.5), "((1,), {}, 3 bytes, None, 1.5)"),
        (packed([[[1]]]), "([[[…]]])"),
        (packed(np.zeros(100_000), datetime.date(2026, 1, 2)), "(<array>, <datetime.date>)"),
        (packed(lambda: 1), "(<function>)"),
        (packed("x" * 30, "y" * 30, "z" * 30), f"('{'x' * 30}', '{'y' * 30}', '{'z' * 8}…)"),
    ],
)
def test_arguments_of_a_call_are_read_from_their_pickle(data: bytes, shown: str) -> None:
    assert payload_layout.show_payload(data) == shown
    assert len(shown) <= payload_layout.MAX_SHOWN_CHARACTERS


def test_code_in_a_pickle_is_not_executed(tmp_path: Path) -> None:
    touched = tmp_path / "ran"
    assert payload_layout.show_payload(packed(Touches(touched))) == "(<posix.system>)"
    assert not touched.exists()


@pytest.mark.parametrize("data", [b"", b"\x80", b"B" * 40, b"\x80\x05.", b"no pickle", packed(1)[:-3]])
def test_invalid_argument_bytes_are_shown_as_nothing(data: bytes) -> None:
    assert payload_layout.show_payload(data) == ""


def test_secrets_are_not_shown_in_arguments() -> None:
    assert (
        payload_layout.show_payload(packed("gpt2", api_key="sk-1", hf_token="hf_2", n=1))
        == "('gpt2', api_key=…, hf_token=…, n=1)"
    )
    assert "hunter2" not in payload_layout.show_payload(packed({"password": "hunter2"}))
    assert payload_layout.show_arguments(("gpt2", "sk-1"), {}, names=("model", "token")) == "('gpt2', …)"


@context
def llm(path: str, token: str = "", *, layers: int = 1) -> str:
    return path


def test_recipe_shows_its_arguments() -> None:
    one, other = llm("small"), llm("large", "hf_1", layers=2)
    assert one.title == f"{one.name}('small')"
    assert other.title == f"{other.name}('large', …, layers=2)"
