from __future__ import annotations

import json
import sys

from faults.world import World
from session.held import output_of
from session.test_session_up import stoker

PROGRAM = """
import sys

import parsl
import stoker
from stoker.errors import ConfigError


@stoker.context
def other(number=1):
    return number


def echo(item):
    return item


@parsl.python_app(executors=["stoker"])
def plain(item, parsl_resource_specification=None):
    return item


def refused(wish, ask):
    try:
        ask()
    except ConfigError as error:
        assert "does not honour" in str(error) and f"leave out {wish}" in str(error), error
        print(wish)


varies = stoker.app(variants=[other()])(echo)
related = stoker.app(context=stoker.family({10: other(1), 20: other(2)}, count=len))(lambda length, text: length)
with stoker.load(session=sys.argv[1]):
    assert stoker.app(echo)(3).result(60) == 3
    refused("variants", lambda: varies(1).result(60))
    refused("variants", lambda: list(stoker.map(varies, [1, 2])))
    refused("variants", lambda: related("x").result(60))
    for wish in ("latency_s", "ttft_s", "tpot_s"):
        refused(wish, lambda: plain(1, parsl_resource_specification={wish: 5.0}).result(60))
"""
SAID = ["variants", "variants", "variants", "latency_s", "ttft_s", "tpot_s"]
SITE = '[pilot]\ndevices = "cpu:1"\n'


def run(world: World, *arguments: str) -> str:
    return output_of(world.spawn([sys.executable, *arguments], folder=world.path))


def test_joined_session_refuses_each_unsupported_option(world: World) -> None:
    (world.path / "one.toml").write_text(SITE)
    (world.path / "wishes.py").write_text(PROGRAM)
    session = str(json.loads(stoker(world, "up", "one.toml", "--json").stdout)["session"])
    try:
        assert run(world, "wishes.py", session).split() == SAID
    finally:
        assert stoker(world, "down", session).returncode == 0


DUES = """
import time

import parsl
import stoker
from stoker.contexts import ambient


@parsl.python_app(executors=["stoker"])
def dues(parsl_resource_specification=None):
    import time
    from stoker.contexts import ambient

    now = time.monotonic()
    return [ambient.token_due_times(tokens)[0] - now for tokens in (1, 1000, 9000)], ambient.token_due_times(1)[1]


with stoker.load(site="one.toml"):
    wishes = {"ttft_s": 50.0, "ttft_per_token_s": 0.1, "ttft_most_s": 200.0, "tpot_s": 0.25}
    firsts, further = dues(parsl_resource_specification=wishes).result(60)
    print(*(round(first, -1) for first in firsts), further)
    firsts, further = dues().result(60)
    print(*firsts, further)
"""


def test_context_that_writes_tokens_receives_their_deadlines(world: World) -> None:
    (world.path / "one.toml").write_text(SITE + '[policy]\nname = "slinfer"\n')
    (world.path / "dues.py").write_text(DUES)
    assert run(world, "dues.py").splitlines() == ["50.0 100.0 200.0 0.25", "inf inf inf 0.0"]
