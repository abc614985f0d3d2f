from __future__ import annotations

import pytest

from benchmarks.papers.slinfer import worlds as data
from stoker.contexts.step_times import StepModel

here = pytest.mark.skipif(bool(data.missing()), reason=data.missing())


@here
def test_published_profile_has_the_values_of_the_paper() -> None:
    profile = data.read_profile("llama-2-7b", "cpu:cpu")
    model = StepModel(profile.times)
    assert model.step_s(prefill=True, tokens=1024, length=512) == pytest.approx(0.567)  # the value in SLINFER's Table I
    assert [model.step_s(prefill=False, tokens=b, length=1024) for b in (1, 32)] == pytest.approx([0.071, 0.196])
    limits = [
        (data.read_profile(size, device).limit, data.read_profile(size, device).shared_limit)
        for device in ("cpu:cpu", "gpu:gpu")
        for size in ("llama-3.2-3b", "llama-2-7b", "llama-2-13b")
    ]
    assert limits == [(59, 23), (15, 4), (6, 6), (160, 71), (32, 12), (16, 4)]  # SLINFER's §IX-A


@here
@pytest.mark.parametrize(("models", "requests"), [(128, 9266), (64, 4684), (32, 2366)])
def test_workload_has_the_requests_of_the_sampled_functions(models: int, requests: int) -> None:
    arrivals = data.read_workload("AzureConv", models)
    assert len(arrivals) == requests
    assert len({arrival.context for arrival in arrivals}) == models
    assert [arrival.at_s for arrival in arrivals] == sorted(arrival.at_s for arrival in arrivals)
    assert {arrival.expected_output for arrival in arrivals} == {0}  # policies do not know the lengths of the outputs
    assert all(arrival.output > 0 for arrival in arrivals)
