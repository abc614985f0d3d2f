from __future__ import annotations

import json
import sys

from faults.world import World
from session.held import output_of

PROGRAM = """
import json
import os

import parsl
import stoker
from stoker.errors import InputTooLongError


@stoker.context
def runtime(length):
    return length


@parsl.python_app(executors=["stoker"])
def written(text):
    return text


family = stoker.family({10: runtime(10), 20: runtime(20), 40: runtime(40)}, count=len)


@stoker.app(context=family, latency="2 s")
def read(length, text):
    assert len(text) <= length, (length, text)
    return length


@stoker.app(context=family, latency="2 s")
def end_once(length, text, marker):
    if not os.path.exists(marker):
        open(marker, "w").close()
        os._exit(3)
    return length


said = {}
with stoker.load(site="one.toml"):
    said["one"] = read("x" * 33).result(60)
    said["by name"] = read(text="x" * 33).result(60)
    said["of a future"] = read(written("x" * 21)).result(60)
    said["of a map"] = list(stoker.map(read, ["x" * 12, "x" * 40]))
    for asked in (lambda: read("x" * 41), lambda: list(stoker.map(read, ["x" * 41]))):
        try:
            asked()
        except InputTooLongError as error:
            said.setdefault("too long", []).append([error.tokens, error.longest])
    said["after a kill"] = end_once("x" * 5, os.path.abspath("marker")).result(60)
    try:
        stoker.app(context=stoker.family({10: runtime(10)}))(lambda length, text: length)("x")
    except stoker.errors.ConfigError as error:
        said["nothing counts"] = str(error)
print(json.dumps(said))
"""
SITE = '[pilot]\ndevices = "cpu:4"\n[policy]\nname = "arlo"\n'


def test_call_runs_on_a_runtime_that_is_long_enough_for_its_input(world: World) -> None:
    (world.path / "one.toml").write_text(SITE)
    (world.path / "family.py").write_text(PROGRAM)
    said = json.loads(output_of(world.spawn([sys.executable, "family.py"], folder=world.path), limit_s=180))
    assert said["one"] == said["by name"] == said["of a future"] == 40
    first, last = said["of a map"]
    assert (first in (20, 40), last) == (True, 40)
    assert said["too long"] == [[41, 40], [41, 40]]
    assert said["after a kill"] in (10, 20, 40)
    assert "needs the length of its input" in said["nothing counts"]
