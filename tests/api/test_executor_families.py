from __future__ import annotations

import pickle

import pytest

import stoker
from stoker.errors import ConfigError, InputTooLongError, RecipeError
from stoker.manager.executor.options import SpecificationError, parse_call_specification


@stoker.context
def runtime(length):
    return length


FAMILY = stoker.family({64: runtime(64), 16: runtime(16), 32: runtime(32)}, count=len)


def lengths(wants):
    return [recipe.longest_input for recipe in (wants.recipe, *wants.variants)]


def test_family_is_sorted_by_length_and_recipes_name_their_length():
    assert FAMILY.lengths == (16, 32, 64)
    assert [recipe.longest_input for recipe in FAMILY.recipes] == [16, 32, 64]
    assert "inputs up to 16 tokens" in repr(FAMILY.recipes[0])
    assert runtime(16).longest_input == 0


@pytest.mark.parametrize("runtimes", [{}, {0: runtime(1)}, {-3: runtime(1)}, {8: "llm"}, {8: runtime}])
def test_invalid_family_is_refused(runtimes):
    with pytest.raises(RecipeError, match="famil"):
        stoker.family(runtimes)


def test_call_prefers_the_shortest_runtime_that_fits():
    wants = parse_call_specification({"context": FAMILY}, takes_context=True)
    assert lengths(wants.chosen(("x" * 16,), {})) == [16, 32, 64]
    assert lengths(wants.chosen(("x" * 17,), {})) == [32, 64]
    assert lengths(wants.chosen((), {"text": "x" * 64})) == [64]
    assert wants.chosen(("x",), {}) is wants.chosen(("xx",), {})
    chosen = wants.chosen(("x",), {})
    assert chosen.options.variants == tuple(recipe.key for recipe in chosen.variants)
    assert chosen.takes_context


def test_length_from_the_features_counts():
    wants = parse_call_specification({"context": FAMILY, "features": {"input_length": 20}})
    assert lengths(wants.chosen(("x" * 60,), {})) == [32, 64]
    wants = parse_call_specification({"context": stoker.family({8: runtime(8)})})
    with pytest.raises(ConfigError, match="needs the length of its input"):
        wants.chosen(("x",), {})


def test_too_long_input_is_refused_with_both_lengths():
    wants = parse_call_specification({"context": FAMILY})
    said = r"65 tokens, and the longest runtime of runtime-\w+ accepts 64"
    with pytest.raises(InputTooLongError, match=said) as caught:
        wants.chosen(("x" * 65,), {})
    assert (caught.value.tokens, caught.value.longest) == (65, 64)
    with pytest.raises(ValueError, match="65 tokens"):
        raise pickle.loads(pickle.dumps(caught.value))


def test_family_names_its_own_variants():
    with pytest.raises(SpecificationError, match="variants"):
        parse_call_specification({"context": FAMILY, "variants": [runtime(1)]})
