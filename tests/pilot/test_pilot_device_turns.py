from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from stoker.pilot.core.turns import PATIENCE_S, TurnRequest, next_turns
from stoker.protocol.ids import DeviceId, LibraryId

ONE = (DeviceId("gpu:0"),)
TWO = (DeviceId("gpu:0"), DeviceId("gpu:1"))


def wants(library: int, due_at: float, *, since: float = 0.0, devices: tuple[DeviceId, ...] = ONE) -> TurnRequest:
    return TurnRequest(LibraryId(library), devices, due_at, since)


def test_engine_with_the_least_headroom_takes_the_turn() -> None:
    assert next_turns([wants(1, 2.2), wants(2, 1.9), wants(3, 2.0)], ()) == [2]  # Figure 14


def test_token_with_an_objective_precedes_one_without() -> None:
    assert next_turns([wants(1, math.inf), wants(2, 7.0)], ()) == [2]


def test_libraries_on_different_devices_compute_in_parallel() -> None:
    other = (DeviceId("gpu:1"),)
    assert next_turns([wants(1, 2.0), wants(2, 3.0, devices=other), wants(3, 1.0)], ()) == [3, 2]
    assert next_turns([wants(1, 2.0), wants(2, 3.0, devices=other)], ONE) == [2]


def test_more_urgent_library_blocks_other_starts_on_its_device() -> None:
    assert next_turns([wants(1, 1.0, devices=TWO), wants(2, 2.0, devices=(DeviceId("gpu:1"),))], ONE) == []
    assert next_turns([wants(1, 1.0, devices=TWO), wants(2, 2.0)], ()) == [1]


@given(
    st.lists(
        st.tuples(st.sampled_from([-1000.0, 0.0, 0.5, 30.0, math.inf]), st.floats(0.01, 3.0), st.booleans()),
        min_size=2, max_size=6,
    )
)  # fmt: skip
def test_wait_is_bounded_by_patience_and_one_turn_of_each_library(libraries: list[tuple[float, float, bool]]) -> None:
    """Libraries as (`due_at`, seconds of an iteration, True if on both devices). A `due_at` long past means always
    late.
    """
    devices = {n: TWO if both else ONE for n, (_, _, both) in enumerate(libraries)}
    since, now, had = dict.fromkeys(devices, 0.0), 0.0, dict.fromkeys(devices, 0)
    longest = PATIENCE_S + sum(seconds for _, seconds, _ in libraries)
    for _ in range(300):
        asked = [wants(n, libraries[n][0], since=since[n], devices=devices[n]) for n in devices]
        [chosen] = next_turns(asked, ())
        assert now - since[chosen] <= longest
        now += libraries[chosen][1]
        since[chosen] = now
        had[chosen] += 1
    assert all(now - at <= longest for at in since.values())
    if now > 2 * longest:
        assert min(had.values()) > 0
