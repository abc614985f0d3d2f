from __future__ import annotations

import msgspec
import pytest

from benchmarks.papers.pervasive import fit, paper, predict
from benchmarks.papers.pervasive.fit import BOUNDS, Fit, Parameters, is_possible
from stoker.contexts.recipe import Awareness

KNOWN = Parameters(
    item_a10_s=0.25, item_titan_s=0.74, load_a10_s=16.0, load_titan_s=21.0, call_s=0.044,
    shared_node_bytes_per_s=220e6, network_bytes_per_s=600e6, warm_items=36, warm_item_s=0.29, boot_s=10.0,
)  # fmt: skip


@pytest.mark.long
def test_search_finds_parameters_that_reproduce_the_static_runs() -> None:
    found = next(sets for sets in map(fit.search, range(20)) if any(one.close for one in sets))
    for one in found:
        assert is_possible(one.parameters)
        assert all(bound.low <= getattr(one.parameters, name) <= bound.high for name, bound in BOUNDS.items())
        assert one.worst <= (fit.CLOSE if one.close else fit.FAIR)
        errors = fit.relative_errors(one.parameters).values()
        assert one.worst == max(map(abs, errors))


def test_most_central_and_farthest_parameter_sets_are_chosen() -> None:
    def at(load_a10_s: float, worst: float = 0.01) -> Fit:
        return Fit(worst, msgspec.structs.replace(KNOWN, load_a10_s=load_a10_s))

    found = [at(10.0), at(11.0), at(20.0), at(21.0), at(60.0), at(100.0, worst=0.04)]
    chosen = fit.choose_fits(found, 4)
    assert [each.parameters.load_a10_s for each in chosen] == [20.0, 60.0, 100.0, 10.0]
    assert fit.choose_fits(found, 100)[:4] == chosen
    assert len(fit.choose_fits(found, 100)) == len(found)
    assert fit.choose_fits([at(10.0, worst=0.04)], 3) == ()  # no set is close to the paper, so no set is chosen


@pytest.mark.long
@pytest.mark.parametrize(
    ("awareness", "batch"),
    [(Awareness.NONE, 1000), (Awareness.DISK, 100), (Awareness.DISK, 1000), (Awareness.FULL, 100)],
)
def test_closed_form_and_simulator_agree(awareness: Awareness, batch: int) -> None:
    simulated = predict.simulate_static_run(KNOWN, paper.Run("", awareness, batch, 0.0))
    assert simulated == pytest.approx(fit.static_run_s(KNOWN, awareness, batch), rel=0.02)


@pytest.mark.long
def test_full_context_awareness_completes_more_than_disk_awareness() -> None:
    found = {(one.awareness, one.variant): one for one in predict.figure_8(KNOWN)}
    full = found[Awareness.FULL, predict.NONE_LOST].value
    assert full > 1.3 * found[Awareness.DISK, "from 900 s"].value > 0
    early, late = (found[Awareness.FULL, f"from 900 s, 3 A10 lost at {at_s} s"] for at_s in (60, 600))
    assert early.value < late.value < full
    assert [gpus for _, gpus in early.looks][::60] == [0.0, 17.0, 10.0 + 7 - 6, 1.0]


@pytest.mark.long
def test_loads_are_faster_after_gpus_on_the_same_disk_are_removed() -> None:
    found = predict.simulate_shared_disks(KNOWN)
    alone = predict.simulate_static_run(KNOWN, paper.Run("", Awareness.DISK, 100, 0.0))
    for seconds in found.static_s:
        assert seconds == pytest.approx(alone, rel=0.1)
    [one_gpu, *_] = [one.value for one in predict.figure_8(KNOWN)]
    first = {(run.sharing.gpus, run.sharing.reads): run.done for run in found.runs if run.from_s == 900.0}
    assert first[5, 1.0] > first[5, 0.5] > one_gpu
