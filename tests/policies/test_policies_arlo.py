"""`arlo` at the seams, over a toy cluster: small cases, whose answer is known by hand."""

from __future__ import annotations

from typing import Any

import pytest
from core.toy import Toy

from stoker.manager.core import story
from stoker.manager.core.nouns import CallState, LibraryState
from stoker.manager.policies.arlo import arlo
from stoker.manager.policies.provisioning import TakeWhatComes
from stoker.protocol.calls import Objective

SOON = Objective(latency_s=10.0)
LENGTHS = (64, 128, 256)


class Family(Toy):
    """Runtimes `r64`, `r128` and `r256` of one model, a gigabyte each, which take a quarter, half and a whole second.
    A call has ten."""

    def __init__(
        self, *, load_s: float = 1.0, broken: dict[int, str] | None = None, declares: str = "1 GB", **settings: Any
    ) -> None:
        super().__init__(policies=lambda: arlo(provisioning=TakeWhatComes(), **settings))
        for tokens in LENGTHS:
            why = (broken or {}).get(tokens, "")
            self.context(
                f"r{tokens}", load_s=load_s, declares=declares, broken=why, runs_s=tokens / 256, longest_input=tokens
            )

    def ask(self, *names: str, tokens: int, objective: Objective = SOON, **how: Any) -> Family:
        serving = tuple(f"r{length}" for length in LENGTHS if length >= tokens)
        self.call(*names, context=serving[0], variants=serving[1:], objective=objective, **how)
        return self

    def many(self, count: int, *, tokens: int, name: str = "c", **how: Any) -> Family:
        return self.ask(*(f"{name}{tokens}-{n}" for n in range(count)), tokens=tokens, **how)

    def hot(self) -> dict[str, int]:
        """Ready libraries of each runtime."""
        found: dict[str, int] = {}
        for library in self.core.state.libraries.values():
            if library.state is LibraryState.READY:
                found[library.context.recipe.key] = found.get(library.context.recipe.key, 0) + 1
        return found

    def served(self) -> dict[str, int]:
        return {key: context.served for key, context in self.core.state.contexts.items() if context.served}

    def where(self, name: str) -> str:
        """The runtime that holds a call."""
        return self.core.state.calls[self.ids[name]].holder.context.recipe.key  # type: ignore[union-attr,index]


@pytest.fixture
def family() -> Any:
    made: list[Family] = []

    def make(**settings: Any) -> Family:
        made.append(Family(**settings))
        return made[-1]

    yield make
    for each in made:
        each.check()


def warmed(t: Family, *, devices: int = 4) -> Family:
    """Calls of all lengths have come for two minutes: every runtime is loaded, and has run."""
    t.pilot("p1", devices=devices)
    for second in range(60):
        for tokens in LENGTHS:
            t.ask(f"w{second}-{tokens}", tokens=tokens)
        t.run(until=t.now + 2.0)
    t.run(until=t.now + 200.0)
    return t


# ---- dispatch


def test_a_call_goes_to_the_shortest_runtime_that_is_long_enough(family: Any) -> None:
    t = warmed(family())
    before = t.served()
    t.ask("short", tokens=20).ask("middle", tokens=100).ask("long", tokens=256)
    assert [t.where(name) for name in ("short", "middle", "long")] == ["r64", "r128", "r256"]
    t.run()
    assert {key: t.served()[key] - before[key] for key in before} == {"r64": 1, "r128": 1, "r256": 1}


def test_a_call_is_demoted_when_its_runtime_is_congested_and_the_next_is_clearly_emptier(family: Any) -> None:
    """In ten seconds a library answers 40, 20 and 10 calls. The 35th call is over 0.85 of 40, and the next level is
    empty; its threshold is 0.85 x 0.9, so that it takes 16."""
    t = warmed(family(), devices=3)
    assert t.hot() == {"r64": 1, "r128": 1, "r256": 1}
    t.many(34, tokens=20)
    assert [t.where(f"c20-{n}") for n in range(34)] == ["r64"] * 34
    t.many(16, tokens=20, name="d")
    assert [t.where(f"d20-{n}") for n in range(16)] == ["r128"] * 16
    t.run()


def test_where_every_level_is_congested_the_shortest_takes_it_and_then_calls_wait(family: Any) -> None:
    t = warmed(family(), devices=3)
    before = len(t.ended)
    t.many(34 + 16 + 7, tokens=20)
    held = {key: sum(t.where(f"c20-{n}") == key for n in range(57)) for key in ("r64", "r128", "r256")}
    assert held == {"r64": 34, "r128": 16, "r256": 7}
    t.many(6, tokens=20, name="last").ask("waits", tokens=20)
    assert [t.where(f"last20-{n}") for n in range(6)] == ["r64"] * 6
    assert t.core.state.calls[t.ids["waits"]].state is CallState.WAITING
    told = story.tell_story(t.core.state, f"c-{t.ids['waits']}")
    assert "libraries of r64 and of longer runtimes run other calls" in told.lines[-2].text
    t.run()
    assert len(t.ended) - before == 57 + 7
    assert all(end.ok for end in t.ended.values())


def test_a_call_whose_runtime_has_no_instance_runs_in_a_longer_one(family: Any) -> None:
    t = family()
    t.pilot("p1")
    t.ask("long", tokens=256).run()
    assert t.hot() == {"r256": 1}
    t.ask("short", tokens=10).run(until=t.now + 3.0)
    assert t.ended["short"].ok
    assert t.served() == {"r256": 2}


def test_a_call_whose_runtime_dies_is_placed_anew(family: Any) -> None:
    """Its pilot held the only library of the runtime; what it held goes on in the longer one at once."""
    t = family(out_of_service=0.5)
    t.pilot("p1")
    t.ask("w1", tokens=256).run()
    t.pilot("p2")
    t.many(6, tokens=20, name="w").run()
    t.run(until=t.now + 30.0)
    homes = {x.context.recipe.key: x.pilot.id for x in t.core.state.libraries.values()}
    assert homes == {"r256": "p1", "r64": "p2"}
    t.many(3, tokens=20)
    assert t.where("c20-0") == "r64"
    t.kill("p2")
    t.run(until=t.now + 4.0)
    assert all(t.ended[f"c20-{n}"].ok for n in range(3))


def test_calls_of_no_family_are_served_as_by_default(family: Any) -> None:
    t = family()
    t.pilot("p1", devices=2)
    t.context("other", declares="1 GB")
    t.call("a", "b", context="other").call("c").run()
    assert all(end.ok for end in t.ended.values())


# ---- residency


def test_devices_follow_the_lengths_that_come(family: Any) -> None:
    """Short calls fill nine devices of ten, and then long ones do: the plan of 120 s follows."""
    t = family(period_s=60.0)
    t.pilot("p1", devices=10, memory="40 GB")
    for minute in range(12):
        tokens = 20 if minute < 6 else 256
        for second in range(60):
            t.many(4, tokens=tokens, name=f"m{minute}s{second}")
            t.run(until=t.now + 1.0)
        if minute == 5:
            assert t.hot()["r64"] >= 6
    assert t.hot()["r256"] >= 6
    t.run()
    assert all(end.ok for end in t.ended.values())


def test_no_more_devices_are_out_of_service_than_may_be(family: Any) -> None:
    t = family(period_s=20.0, out_of_service=0.2, load_s=3.0)
    t.pilot("p1", devices=10, memory="40 GB")
    t.many(30, tokens=256).run()
    lowest = 10
    for second in range(120):
        t.many(3, tokens=20, name=f"s{second}")
        t.run(until=t.now + 1.0)
        lowest = min(lowest, sum(t.hot().values()))
    assert t.hot().get("r64", 0) >= 4
    assert lowest == 8
    t.run()
    assert all(end.ok for end in t.ended.values())


def test_a_runtime_of_unknown_size_takes_the_place_of_one_that_fills_the_device(family: Any) -> None:
    """Nothing is declared: what the longest was measured to take is taken for the others."""
    t = family(out_of_service=0.5, declares="")
    t.pilot("p1", devices=2, memory="1.5 GB")
    t.ask("first", tokens=256).run()
    for second in range(30):
        t.many(4, tokens=20, name=f"s{second}")
        t.run(until=t.now + 1.0)
    assert t.hot() == {"r256": 1, "r64": 1}
    t.run()


def test_the_last_library_of_the_longest_runtime_stays(family: Any) -> None:
    t = family(period_s=5.0)
    t.pilot("p1", devices=3)
    t.ask("first", tokens=256).run()
    for second in range(60):
        t.many(3, tokens=20, name=f"s{second}", run_s=0.5)
        t.run(until=t.now + 1.0)
    assert t.hot()["r256"] == 1
    t.ask("long", tokens=200).run(until=t.now + 3.0)
    assert t.ended["long"].ok


def test_the_devices_that_are_left_are_planned_for_at_once(family: Any) -> None:
    """The pilot with the only library of the longest runtime dies, and the plan that wanted it is not old yet."""
    t = family(out_of_service=0.5)
    t.pilot("p1")
    t.ask("first", tokens=256).run()
    t.pilot("p2")
    t.pilot("p3")
    for second in range(40):
        t.many(4, tokens=20, name=f"s{second}")
        t.run(until=t.now + 1.0)
    assert t.hot() == {"r256": 1, "r64": 2}
    t.kill(next(x.pilot.id for x in t.core.state.libraries.values() if x.context.recipe.key == "r256"))
    t.ask("long", tokens=200)
    t.run(until=t.now + 5.0)
    assert t.hot() == {"r256": 1, "r64": 1}
    assert t.ended["long"].ok


def test_a_runtime_that_fails_to_load_is_left_out_and_the_others_serve_its_calls(family: Any) -> None:
    t = family(broken={64: "it does not compile"})
    t.pilot("p1", devices=4)
    for second in range(30):
        t.many(2, tokens=20, name=f"s{second}", run_s=0.2)
        t.run(until=t.now + 1.0)
    t.run()
    assert all(end.ok for end in t.ended.values())
    assert "r64" not in t.hot()
    assert t.core.state.contexts["r64"].load_failures == 2


def test_where_no_runtime_loads_the_calls_are_told_why(family: Any) -> None:
    t = family(broken=dict.fromkeys(LENGTHS, "it does not compile"))
    t.pilot("p1", devices=4)
    t.ask("a", tokens=20).ask("b", tokens=256).run(limit_s=60.0)
    assert "it does not compile" in t.ended["a"].failure.message
    assert "it does not compile" in t.ended["b"].failure.message


def test_it_rests_when_no_calls_come(family: Any) -> None:
    t = warmed(family())
    events = len(t.past)
    t.run(until=t.now + 3600.0)
    assert len(t.past) - events < 5
