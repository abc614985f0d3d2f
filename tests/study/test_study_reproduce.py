"""The reproduction of the context paper: its pieces, on small cases; the page itself is made by `make reproduce`."""

from __future__ import annotations

import pytest

from stoker.contexts.recipe import Awareness
from stoker.manager.sim.log import Happened, Log
from stoker.manager.study.reproduce import fit, paper, predict, quick, worlds
from stoker.manager.study.reproduce.parameters import BOUNDS, Parameters, possible

KNOWN = Parameters(
    item_a10_s=0.25,
    item_titan_s=0.74,
    load_a10_s=16.0,
    load_titan_s=21.0,
    call_s=0.044,
    shared_node_bytes_per_s=220e6,
    warm_items=36,
    warm_item_s=0.29,
    boot_s=10.0,
)


def test_the_search_finds_sets_that_explain_the_static_runs_within_the_bounds() -> None:
    [parameters] = fit.fits(1, seed=3)
    assert possible(parameters)
    assert all(bound.low <= getattr(parameters, name) <= bound.high for name, bound in BOUNDS.items())
    assert max(abs(error) for error in quick.errors(parameters).values()) <= fit.GOOD


@pytest.mark.parametrize(
    ("awareness", "batch"),
    [(Awareness.NONE, 100), (Awareness.DISK, 100), (Awareness.DISK, 1000), (Awareness.FULL, 100)],
)
def test_the_closed_form_and_the_simulator_agree(awareness: Awareness, batch: int) -> None:
    simulated = predict.static(KNOWN, paper.Run("", awareness, batch, 0.0)).value
    assert simulated == pytest.approx(quick.seconds(KNOWN, awareness, batch), rel=0.02)


def test_gpus_vanish_one_a_minute_a10s_first() -> None:
    pools = worlds.vanishing()
    assert pools[paper.A10][:2] == ((0.0, 10), (900.0, 9))
    assert pools[paper.A10][-1] == (900.0 + 9 * 60.0, 0)
    assert pools[paper.TITAN][:2] == ((0.0, 10), (1500.0, 9))
    assert pools[paper.TITAN][-1] == (1500.0 + 9 * 60.0, 0)
    early = worlds.vanishing(lost_early=3, lost_at_s=60.0)
    assert early[paper.A10][:3] == ((0.0, 10), (60.0, 7), (900.0, 6))
    assert early[paper.A10][-1][1] == 0


def test_a_pool_that_grows_is_whole_gpus_in_the_proportions_of_the_cluster() -> None:
    pools = worlds.ramp(paper.TABLE_1, first=0, last=186, until_s=600.0)
    assert sum(steps[-1][1] for steps in pools.values()) == 186
    assert pools["NVIDIA Quadro RTX 6000"][-1][1] == round(186 * 106 / 427)
    for steps in pools.values():
        assert [at for at, _ in steps] == sorted({at for at, _ in steps})
        assert [count for _, count in steps] == sorted(count for _, count in steps)


def test_the_distance_from_a_straight_line_is_what_loads_cost() -> None:
    log = Log()
    log.note(0.0, Happened.CAPACITY, block=0, value=2.0)  # two GPUs, which do one inference a second each
    for second in range(11, 111):
        log.note(float(second), Happened.CALL_ENDED, value=2.0)  # from 10 s on: a load took so long
    # The line goes from nothing to 200 inferences at 220; after the load it is 18.2 ahead.
    assert predict.off_line(log, [1.0]) == pytest.approx(20.0 * (200 / 220) / 200, rel=0.15)


def test_with_full_awareness_more_is_done_while_gpus_vanish() -> None:
    found = {one.variant: one.value for one in predict.figure_8(KNOWN)}
    assert found["full"] > 1.3 * found["disk"] > 0
    assert found["full, 3 lost at 60 s"] < found["full, 3 lost at 600 s"] < found["full"]
