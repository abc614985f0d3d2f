from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.apps.batch_inference.request_file import check_file
from stoker.apps.common.models_file import read_models
from stoker.apps.common.openai_requests import RequestRefused
from stoker.apps.fact_verification.options import read_prompts
from stoker.apps.gateway.batch_files import parse_batch_request
from stoker.apps.inference_sweep.plan import read_sweep
from stoker.config import load_site
from stoker.datafile import read_lines, read_rows
from stoker.decoding import describe_non_text_format
from stoker.errors import ConfigError
from stoker.manager.study.scenario import load_scenario
from stoker.tuning.job import read_job

LATIN = "name = 'a'\n\nb = 'caf\xe9'\n".encode("latin-1")


def requests(path: Path) -> None:
    check_file(path, admit=lambda _request: None)


TOML: dict[str, Callable[[Path], Any]] = {
    "site": load_site, "models": read_models, "scenario": load_scenario, "job": read_job, "prompts": read_prompts,
    "sweep": read_sweep,
}  # fmt: skip
ROWS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": lambda path: list(read_rows(path)), "a.csv": lambda path: list(read_rows(path)),
    "requests.jsonl": requests, "lines.jsonl": lambda path: list(read_lines(path)),
}  # fmt: skip


def refused(read: Callable[[Path], Any], path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    assert caught.value.file == str(path)
    return said.removeprefix(f"{path}: ")


@pytest.mark.parametrize("name", TOML)
def test_error_names_the_toml_file_that_is_not_utf_8(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.toml"
    text = "name = 'a'\n"
    assert "is UTF-16 text, and must be UTF-8" in refused(TOML[name], path, text.encode("utf-16"))
    assert "is compressed with gzip; unpack it" in refused(TOML[name], path, gzip.compress(text.encode()))
    assert refused(TOML[name], path, LATIN).startswith("line 3: byte 9 (0xe9) is not UTF-8 text; if it is Latin-1,")


@pytest.mark.parametrize("name", ROWS)
def test_error_names_the_format_of_a_data_file_that_is_not_utf_8(tmp_path: Path, name: str) -> None:
    path, text = tmp_path / name, '{"text": "a"}\n'
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        assert refused(ROWS[name], path, text.encode(encoding)).startswith("is UTF-16 text, and must be UTF-8;")
    assert "compressed with gzip; give its name the ending .gz" in refused(
        ROWS[name], path, gzip.compress(text.encode())
    )
    assert "is a zip archive" in refused(ROWS[name], path, b"PK\x03\x04" + bytes(99))
    packed = path.with_name(f"{name}.gz")
    assert "but it is plain text; rename it" in refused(ROWS[name], packed, text.encode())
    assert refused(ROWS[name], packed, gzip.compress(gzip.compress(text.encode()))).startswith(
        "is compressed with gzip;"
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_error_names_line_and_byte_of_a_latin_1_character(tmp_path: Path, name: str) -> None:
    rows = '{"text": "a"}\n{"text": "caf\xe9"}\n' if name == "a.jsonl" else "text\ncaf\xe9\n"
    said = refused(ROWS[name], tmp_path / name, rows.encode("latin-1"))
    place = rows.split("\n")[1].index("\xe9") + 1
    assert said.startswith(f"line 2: byte {place} (0xe9) is not UTF-8 text")


def test_batch_request_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    line = '{"custom_id": "caf\xe9"}'
    (tmp_path / "requests.jsonl").write_bytes(b'{"custom_id": "a"}\n' + line.encode("latin-1") + b"\n")
    last = check_file(tmp_path / "requests.jsonl", admit=lambda _request: None).refused[-1].error
    assert last.message.startswith(f"line 2: is not JSON: byte {line.index(chr(0xE9)) + 1} (0xe9) is not UTF-8 text")
    with pytest.raises(RequestRefused) as caught:
        parse_batch_request('{"endpoint": "a"}'.encode("utf-16"))
    assert "is UTF-16 text" in caught.value.error.message


def test_text_in_utf_8_is_accepted() -> None:
    for text in ("", "\u6f22\u5b57 and \u00e9", "ab" * 200):
        assert describe_non_text_format(text.encode()[:256]) == ""


def test_site_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_bytes(b'\xef\xbb\xbfname = "lab"\r\n')
    assert load_site(tmp_path / "site.toml").name == "lab"
