from __future__ import annotations

import importlib.util
import json
import re
import shutil

import pytest
from docs.conftest import Place
from docs.pages import commands, text_of
from tiny_model import write_tiny_model

from stoker.apps.batch_inference.options import EXAMPLE
from stoker.apps.batch_inference.request_file import parse_request_line
from stoker.apps.common.openai_requests import HONOURED, Endpoint
from stoker.datafile import Line

PAGE = "docs/batch.md"
NOT_RUN = {
    "stoker batch": "loads the demo's model; tests/apps/test_apps_batch_requests.py checks the example's lines",
    "stoker batch requests.jsonl --model models/small --session rwcz": "needs a session that is up;"
    " tests/apps/test_apps_end_to_end.py joins one",
}
LIMIT_S = 150


def test_request_on_the_page_is_valid() -> None:
    (shown,) = re.findall(r"^```json\n(.*)\n```$", text_of(PAGE), re.MULTILINE)
    found = parse_request_line(Line(1, shown.encode()), seen={}, admit=lambda _request: None)
    assert getattr(found, "endpoint", None) is Endpoint.CHAT


def test_fields_on_the_page_are_the_supported_fields() -> None:
    for endpoint in Endpoint:
        (row,) = re.findall(rf"^\| `{endpoint.value}` \| (.*) \|$", text_of(PAGE), re.MULTILINE)
        named = set(re.findall(r"`(\w+)`", row)) - {"system", "user", "assistant", "float", "base64"}
        assert named == HONOURED[endpoint]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")),
    reason="needs torch and transformers",
)
def test_commands_of_the_page_run_in_order(place: Place) -> None:
    assert set(NOT_RUN) <= set(commands(PAGE))
    (place.folder / "models").mkdir()
    for name in ("small", "large"):
        write_tiny_model(place.folder / "models" / name)
    shutil.copy(EXAMPLE, place.folder / "requests.jsonl")
    for command in commands(PAGE):
        if command not in NOT_RUN:
            place.run(command, limit_s=LIMIT_S)
    asked = [json.loads(line)["custom_id"] for line in EXAMPLE.read_text().splitlines()]
    (named,) = (place.folder / "runs").iterdir()
    for folder in (place.folder / "answers", named):
        lines = (folder / "responses.jsonl").read_text().splitlines()
        assert [json.loads(line)["custom_id"] for line in lines] == asked
        assert (folder / "errors.jsonl").read_bytes() == b""
