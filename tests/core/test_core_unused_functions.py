"""A function that its client sends anew, because what it captured has changed, takes room once."""

from __future__ import annotations

from collections.abc import Callable

from core.builders import Cluster

from stoker.manager.sim.validate import validate
from stoker.protocol import to_manager as say

Make = Callable[..., Cluster]


def steps(c: Cluster, *numbers: int) -> None:
    """Calls of a function that changes before each of them; of each but the first the manager hears what is unused."""
    for number in numbers:
        c.tell("ana", say.DefineFunction(f"f{number}", "f", bytes(1000)))  # type: ignore[arg-type]
        c.call(f"{number}", function=f"f{number}")
        if number:
            c.tell("ana", say.Received(0, (f"f{number - 1}",)))  # type: ignore[arg-type]


def test_unused_functions_are_forgotten_after_their_calls(cluster: Make) -> None:
    c = cluster(pilots=1)
    state = c.core.state
    before = set(state.functions)
    for number in range(20):
        steps(c, number)
        c.ready().end(f"{number}")
        validate(state)
        assert set(state.functions) - before <= {f"f{number - 1}", f"f{number}"}
    assert len(state.groups) <= 2
    assert len(state.costs) <= 2
    assert len(state.unused_functions) <= 1


def test_open_calls_keep_theirs(cluster: Make) -> None:
    c = cluster(pilots=1)
    steps(c, 0, 1, 2)
    assert {"f0", "f1", "f2"} <= set(c.core.state.functions)
    c.ready().end("0").end("1").end("2")
    steps(c, 3)
    assert {"f0", "f1", "f2", "f3"} & set(c.core.state.functions) == {"f3"}


def test_what_another_client_has_defined_stays(cluster: Make) -> None:
    c = cluster(pilots=1).client("bob")
    c.tell("bob", say.DefineFunction("f0", "f", bytes(1000)))  # type: ignore[arg-type]
    steps(c, 0)
    c.ready().end("0")
    steps(c, 1)
    assert "f0" in c.core.state.functions
    c.call("again", function="f0", client="bob").ready().end("1").end("again")
    assert not c.refused


def test_what_is_defined_again_is_called_again(cluster: Make) -> None:
    c = cluster(pilots=1)
    steps(c, 0)
    c.ready().end("0")
    steps(c, 1)
    c.tell("ana", say.DefineFunction("f0", "f", bytes(1000)))  # type: ignore[arg-type]
    c.end("1").call("once more", function="f0").end("once more")
    assert not c.refused
    steps(c, 2)
    c.tell("ana", say.Received(0, ("f0",)))  # type: ignore[arg-type]
    assert {"f0", "f1", "f2"} & set(c.core.state.functions) == {"f2"}
