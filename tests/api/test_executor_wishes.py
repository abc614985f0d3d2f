"""What a call may wish for, and how it is refused what no policy would honour."""

from __future__ import annotations

import pytest
from core.builders import cluster

import stoker
from stoker.errors import ConfigError
from stoker.manager.core.wishes import WISHES, refusal
from stoker.manager.executor.engines import check_wants
from stoker.manager.executor.wants import SpecificationError, read_wants
from stoker.manager.policies import SHIPPED
from stoker.manager.protocol.calls import CallOptions, FailureKind, Objective
from stoker.site import Policy, Site


def load_model():
    return 1


WISHED = {
    "priority": {"priority": 1},
    "deadline": {"deadline_s": 60},
    "latency_s": {"latency_s": 1},
    "ttft_s": {"ttft_s": 1},
    "tpot_s": {"tpot_s": 1},
    "variants": {"variants": [stoker.context(load_model)()]},
    "stream": {"stream": True},
    "expected_output": {"features": {"expected_output": 10}},
}


@pytest.mark.parametrize("policy", SHIPPED)
def test_what_the_policy_does_not_honour_is_refused_where_it_is_made(policy: str) -> None:
    honours = SHIPPED[policy].make().dispatch.honours
    site = Site(policy=Policy(name=policy))
    assert set(WISHED) == set(WISHES) >= honours
    for wish, specification in WISHED.items():
        wants = read_wants(specification)
        if wish in honours:
            check_wants(site, wants, honours=honours)
        else:
            with pytest.raises(ConfigError, match=f"the policy {policy} does not honour .*leave {wish} away"):
                check_wants(site, wants, honours=honours)
        check_wants(site, wants, honours=None)  # a session that is joined has a policy of its own


def test_the_shipped_policies_honour_what_the_page_says() -> None:
    both, alone = frozenset({"priority", "deadline"}), frozenset({"deadline"})
    honoured = {name: policy.make().dispatch.honours for name, policy in SHIPPED.items()}
    assert honoured == {name: alone if name in ("infless", "elastic-flow") else both for name in SHIPPED}


def test_the_manager_refuses_what_its_policy_does_not_honour_and_nothing_else() -> None:
    c = cluster(pilots=1).call("no", stream=True).call("nor", objective=Objective(ttft_s=1.0)).call("yes", priority=3)
    for name, wish in (("no", "stream"), ("nor", "ttft_s")):
        failure = c.ended[name].failure
        assert failure is not None
        assert failure.kind is FailureKind.DROPPED
        assert f"leave {wish} away" in failure.message
    c.ready().end("yes")
    assert c.ended["yes"].ok
    assert c.refused == {"wish that the policy does not honour": 2}
    c.check()


def test_several_wishes_are_named_together() -> None:
    said = refusal(CallOptions(priority=1, stream=True), frozenset({"deadline"}))
    assert (
        "does not honour a priority, a stream of results (it honours a deadline); leave priority, stream away" in said
    )


def test_late_without_a_deadline_is_refused() -> None:
    with pytest.raises(SpecificationError, match="late: 'drop' is not of any use without a deadline"):
        read_wants({"late": "drop"})
    assert read_wants({"late": "drop", "deadline_s": 5}).options.objective.drop_late
    assert not read_wants({"late": "run"}).options.objective.drop_late
