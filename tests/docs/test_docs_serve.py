from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from adapter_folders import write_tiny_lora
from docs.pages import blocks, commands, programs, text_of
from faults.world import World
from gateway.running import LIMIT_S, RunningGateway

from stoker.apps.common.models_file import parse_models
from stoker.apps.common.openai_requests import Endpoint
from stoker.apps.gateway.cli import command as serve
from stoker.apps.gateway.cli import manage_keys as keys
from stoker.manager.cli.main import cli

PAGE = "docs/serve.md"
NOT_RUN = {
    "stoker serve models.toml": "on the machine's own site; the next one says where",
}


def test_models_file_in_the_docs_is_valid(tmp_path: Path) -> None:
    write_tiny_lora(tmp_path / "lora", seed=1)
    [shown] = [block.text for block in blocks(PAGE) if block.language == "toml"]
    found = parse_models(shown, file=PAGE, folder=tmp_path)
    assert list(found) == list(tomllib.loads(shown)["models"])


def test_endpoints_on_the_page_equal_those_of_the_gateway() -> None:
    named = set(re.findall(r"`(/[a-z0-9/.]*)`", text_of(PAGE)))
    others = ("responses", "score", "rerank", "files", "batches", "models", "usage")
    pages = ("/", "/status", "/health", "/metrics", "/grafana.json", "/tokenize", "/detokenize")
    assert named == {*(each.value for each in Endpoint), *(f"/v1/{name}" for name in others), *pages}


def test_options_on_the_page_exist() -> None:
    context = click.Context(cli)
    shown = (serve.get_command(context, "x"), keys.get_command(context, "add"), serve.get_command(context, "usage"))
    known = {option for each in shown if each is not None for one in each.params for option in one.opts}
    named = set(re.findall(r"`(--[a-z-]+)", text_of(PAGE)))
    assert named <= known


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(find_spec, ("openai", "starlette", "uvicorn", "prometheus_client", "torch", "transformers"))),
    reason="needs the extras serve, models and test",
)
def test_commands_and_program_of_the_page_run(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("STOKER_SESSION", raising=False)
    rest = [one for one in commands(PAGE) if one not in NOT_RUN]
    assert rest.pop(0) == "stoker serve site.toml models.toml"
    with World(tmp_path / "world").entered(limit_s=LIMIT_S):
        gateway = RunningGateway(tmp_path / "work")
        gateway.start()
        try:
            [program] = programs(PAGE)
            text = program.text.replace("http://127.0.0.1:8000", gateway.url)
            done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=LIMIT_S)
            assert done.returncode == 0, done.stderr
            assert done.stdout
            for each in rest:
                program_name, *words = shlex.split(each)
                assert program_name == "stoker"
                subprocess.run([sys.executable, "-m", "stoker.manager.cli.main", *words], timeout=LIMIT_S, check=True)
        finally:
            gateway.end()
