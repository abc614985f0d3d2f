"""Options that need the support of a policy are refused if the policy lacks it."""

from __future__ import annotations

import pickle

import pytest
from core.builders import cluster

import stoker
from benchmarks.baselines.loading import policy
from stoker.errors import ConfigError, InputTooLongError, RecipeError
from stoker.manager.core.seams import WISHES, describe_refused_options
from stoker.manager.executor.engines import refuse_unsupported_options
from stoker.manager.executor.options import SpecificationError, parse_call_specification
from stoker.manager.policies import SHIPPED
from stoker.protocol.calls import CallOptions, FailureKind, Objective
from stoker.site import BASELINES, Policy, Site


def load_model():
    return 1


def echo(number, mark="!"):
    return number, mark


WISHED = {
    "priority": {"priority": 1},
    "deadline": {"deadline_s": 60},
    "latency_s": {"latency_s": 1},
    "ttft_s": {"ttft_s": 1},
    "tpot_s": {"tpot_s": 1},
    "variants": {"variants": [stoker.context(load_model)()]},
    "expected_output": {"features": {"expected_output": 10}},
    "min_libraries": {"context": stoker.context(min_libraries=1)(load_model)()},
    "max_libraries": {"context": stoker.context(max_libraries=2)(load_model)()},
    "keep_alive": {"context": stoker.context(keep_alive="1 s")(load_model)()},
}


@pytest.mark.parametrize("policy", SHIPPED)
def test_option_that_the_policy_does_not_support_is_refused(policy: str) -> None:
    honours = SHIPPED[policy].make().honours
    site = Site(policy=Policy(name=policy))
    assert set(WISHED) == set(WISHES) >= honours
    for wish, specification in WISHED.items():
        wants = parse_call_specification(specification)
        if wish in honours:
            refuse_unsupported_options(site, wants, honours=honours)
        else:
            with pytest.raises(ConfigError, match=f"the policy {policy} does not honour .*leave out {wish}"):
                refuse_unsupported_options(site, wants, honours=honours)
        refuse_unsupported_options(site, wants, honours=None)  # a joined session has its own policy


def test_shipped_policies_honour_the_documented_options() -> None:
    both, alone = frozenset({"priority", "deadline"}), frozenset({"deadline"})
    limits = frozenset({"min_libraries", "max_libraries", "keep_alive"})
    special = {
        "infless": alone,
        "elastic-flow": alone,
        "arlo": both | {"variants", "latency_s"},
        "slinfer": both | limits | {"ttft_s", "tpot_s", "expected_output"},
        **dict.fromkeys(
            ("default", "shortest-first", "exclusive", "disk-only", "no-awareness", "random"), both | limits
        ),
    }
    honoured = {name: policy(name).make().honours for name in (*SHIPPED, *BASELINES)}
    assert honoured == {name: special.get(name, both) for name in honoured}


def test_manager_refuses_only_options_its_policy_ignores() -> None:
    c = (
        cluster(pilots=1)
        .call("no", objective=Objective(tpot_s=1.0))
        .call("nor", objective=Objective(ttft_s=1.0))
        .call("yes", priority=3)
    )
    for name, wish in (("no", "tpot_s"), ("nor", "ttft_s")):
        failure = c.ended[name].failure
        assert failure is not None
        assert failure.kind is FailureKind.DROPPED
        assert f"leave out {wish}" in failure.message
    c.ready().end("yes")
    assert c.ended["yes"].ok
    assert c.refused == {"option that the policy does not support": 2}
    c.check()


def test_several_unsupported_options_are_named_together() -> None:
    grows = Objective(ttft_per_token_s=0.01)
    assert "leave out ttft_s" in describe_refused_options(CallOptions(objective=grows), frozenset({"tpot_s"}))
    said = describe_refused_options(CallOptions(priority=1, objective=Objective(ttft_s=1.0)), frozenset({"deadline"}))
    assert "a priority, a time to first token (it honours a deadline); leave out priority, ttft_s" in said


def test_late_option_without_a_deadline_is_refused() -> None:
    with pytest.raises(SpecificationError, match="late: 'drop' is not allowed without a deadline"):
        parse_call_specification({"late": "drop"})
    assert parse_call_specification({"late": "drop", "deadline_s": 5}).options.objective.drop_late
    assert not parse_call_specification({"late": "run"}).options.objective.drop_late


def test_string_given_for_a_list_option_counts_as_one_name() -> None:
    named = stoker.app(executors="gpus", cache=True, ignore_for_cache="mark")(echo)
    assert (named.labels, named.ignore_for_cache) == (["gpus"], ["mark"])
    assert stoker.app(executors="all")(echo).labels is None
    with pytest.raises(ConfigError, match="executors: the list is empty"):
        stoker.app(executors=[])
    with pytest.raises(ConfigError, match="ignore_for_cache: 3 is not a list of names"):
        stoker.app(ignore_for_cache=3)


# ---- families


@stoker.context
def runtime(length):
    return length


FAMILY = stoker.family({64: runtime(64), 16: runtime(16), 32: runtime(32)}, count=len)


def lengths(wants):
    return [recipe.longest_input for recipe in (wants.recipe, *wants.variants)]


def test_runtime_family_sorts_its_recipes_by_input_length():
    assert FAMILY.lengths == (16, 32, 64)
    assert [recipe.longest_input for recipe in FAMILY.recipes] == [16, 32, 64]
    assert "inputs up to 16 tokens" in repr(FAMILY.recipes[0])
    assert runtime(16).longest_input == 0


@pytest.mark.parametrize("runtimes", [{}, {0: runtime(1)}, {-3: runtime(1)}, {8: "llm"}, {8: runtime}])
def test_invalid_runtime_family_is_refused(runtimes):
    with pytest.raises(RecipeError, match="famil"):
        stoker.family(runtimes)


def test_call_prefers_the_shortest_runtime_that_fits():
    wants = parse_call_specification({"context": FAMILY}, takes_context=True)
    assert lengths(wants.with_context_for(("x" * 16,), {})) == [16, 32, 64]
    assert lengths(wants.with_context_for(("x" * 17,), {})) == [32, 64]
    assert lengths(wants.with_context_for((), {"text": "x" * 64})) == [64]
    assert wants.with_context_for(("x",), {}) is wants.with_context_for(("xx",), {})
    chosen = wants.with_context_for(("x",), {})
    assert chosen.options.variants == tuple(recipe.key for recipe in chosen.variants)
    assert chosen.takes_context


def test_input_length_given_as_a_feature_selects_the_runtime():
    wants = parse_call_specification({"context": FAMILY, "features": {"input_length": 20}})
    assert lengths(wants.with_context_for(("x" * 60,), {})) == [32, 64]
    wants = parse_call_specification({"context": stoker.family({8: runtime(8)})})
    with pytest.raises(ConfigError, match="needs the length of its input"):
        wants.with_context_for(("x",), {})


def test_too_long_input_is_refused_with_its_length_and_the_limit():
    wants = parse_call_specification({"context": FAMILY})
    said = r"65 tokens, and the longest runtime of runtime-\w+ accepts 64"
    with pytest.raises(InputTooLongError, match=said) as caught:
        wants.with_context_for(("x" * 65,), {})
    assert (caught.value.tokens, caught.value.longest) == (65, 64)
    with pytest.raises(ValueError, match="65 tokens"):
        raise pickle.loads(pickle.dumps(caught.value))


def test_variants_are_refused_together_with_a_runtime_family():
    with pytest.raises(SpecificationError, match="variants"):
        parse_call_specification({"context": FAMILY, "variants": [runtime(1)]})
