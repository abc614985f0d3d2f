"""Whatever happens under `prompt-tuner`, every call ends, no gang starts by half, and a replay decides the same."""

from __future__ import annotations

from typing import Any

import msgspec
from core.toy import Toy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from policies.fewer_rounds import fewer_rounds

from stoker.manager.policies.prompt_tuner import prompt_tuner
from stoker.manager.policies.provisioning import TakeWhatComes
from stoker.protocol.calls import Objective


class Asked(msgspec.Struct, frozen=True):
    """A call, and what happens before it comes."""

    after_s: float
    context: str
    items: int
    gang: tuple[int, int]
    due_in: float
    drop_late: bool
    kills: str


calls = some.lists(
    some.builds(
        Asked,
        after_s=some.sampled_from([0.0, 0.0, 0.3, 2.0]),
        context=some.sampled_from(["a", "a", "b", "plain"]),
        items=some.integers(1, 12),
        gang=some.sampled_from([(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (3, 4)]),
        due_in=some.sampled_from([0.0, 1.0, 4.0, 8.0, 20.0]),
        drop_late=some.booleans(),
        kills=some.sampled_from(["", "", "", "p1", "p2"]),
    ),
    min_size=1,
    max_size=8,
)
settings_of = some.fixed_dictionaries(
    {},
    optional={
        "delay": some.booleans(), "together": some.booleans(), "reuse": some.booleans(), "early": some.booleans(),
        "window_s": some.sampled_from([0.5, 60.0]),
    },
)  # fmt: skip


def run(asked: list[Asked], *, told: bool, how: dict[str, Any]) -> Toy:
    t = Toy(policies=lambda: fewer_rounds(prompt_tuner(provisioning=TakeWhatComes(), **how)))
    t.by_hand = told
    for name in ("p1", "p2"):
        t.pilot(name, devices=2)
    for key in ("a", "b", "plain"):
        t.context(key, load_s=1.0, declares="5 GB")
        if told:
            t.core.state.contexts[key].paces.tell({n: 1.0 / n for n in range(1, 5)}, meet_s=0.2)
    for n, one in enumerate(asked):
        t.run(until=t.now + one.after_s)
        if one.kills:
            t.kill(one.kills) if t.pilots[one.kills].alive else None
            t.pilot(f"{one.kills}-{n}", devices=2)
        gang, due_in = (one.gang, one.due_in) if one.context != "plain" else ((1, 1), 0.0)
        objective = Objective(deadline_at=t.now + due_in if due_in else 0.0, drop_late=one.drop_late)
        work = {"items": one.items, "run_s": float(one.items), "shared": True, "meet_s": 0.2, "step_s": 1.0}
        t.call(str(n), context=one.context, gang=gang, objective=objective, **work)
    return t.run(limit_s=1000.0)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls, some.booleans(), settings_of)
def test_every_call_ends_and_gangs_begin_together(asked: list[Asked], told: bool, how: dict[str, Any]) -> None:
    t = run(asked, told=told, how=how)
    assert len(t.ended) == len(asked)
    for n, one in enumerate(asked):
        end = t.ended[str(n)]
        assert end.ok or (one.drop_late and one.due_in), end
    began: dict[tuple[int, float], list[tuple[int, int]]] = {}
    for pilot in t.pilots.values():
        for at, call, rank, size in pilot.began:
            began.setdefault((call, at), []).append((rank, size))
    for (call, at), parts in began.items():
        assert sorted(rank for rank, _ in parts) == list(range(parts[0][1])), f"call {call} began by half at {at}"
    t.check()
