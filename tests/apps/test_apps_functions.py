from __future__ import annotations

import json
import pickle

import pytest

import stoker
from stoker.apps.batch_inference.options import ModelPaths
from stoker.apps.common.openai_requests import Endpoint
from stoker.apps.fact_verification import run as facts_run
from stoker.apps.fact_verification.options import VerificationOptions
from stoker.apps.inference_sweep import run
from stoker.apps.inference_sweep.plan import SweepModel
from stoker.apps.prompt_tuning import functions as tuning
from stoker.contexts import RecipeFactory, model_recipe
from stoker.errors import ConfigError, RecipeError


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return tmp_path


def test_equal_loaders_of_a_model_share_one_context(model):
    """Applications and programs with `causal_lm` share one hot model. Loaders that write texts have as many slots as
    the engine serves requests. Loaders that score or tune have one slot.
    """
    assert isinstance(tuning.language_model, RecipeFactory)
    for slots in ("auto", 1):
        recipe = model_recipe(tuning.language_model, model, slots=slots)
        assert recipe.key == stoker.causal_lm(model, slots=slots).key
        assert recipe.title == stoker.causal_lm(model, slots=slots).title
        assert model_recipe(tuning.language_model, model, dtype="bfloat16", slots=slots).key != recipe.key
    assert facts_run.make_recipe(VerificationOptions(model=str(model)))[0].slots == 1
    written = {
        ModelPaths(named={}, every=str(model)).make_recipe("m", Endpoint.CHAT).key,
        run._make_recipe(SweepModel("m", str(model))).key,
    }
    assert written == {stoker.causal_lm(model).key}


def test_model_is_preloaded_with_the_applications_modules(model):
    recipe = model_recipe(tuning.language_model, model, preload=tuning.PRELOAD)
    assert recipe.preload == (*stoker.causal_lm(model).preload, *tuning.PRELOAD)


def test_loader_that_takes_no_dtype_is_refused_by_name(model):
    @stoker.context
    def narrow(path):
        return path

    with pytest.raises(RecipeError, match="narrow"):
        model_recipe(narrow, model)


def test_pickled_app_keeps_its_options(model):
    there = pickle.loads(pickle.dumps(stoker.app(timeout="5 min")(len)))
    assert repr(there.with_options(priority=2)) == "<app len: no context, timeout 5 min, priority 2>"


def test_with_options_is_refused_on_a_method_app(model):
    class Asks:
        @stoker.app(context=stoker.causal_lm(model))
        def ask(self, context, question):
            return context, question

    with pytest.raises(ConfigError, match="ask is a method"):
        Asks.ask.with_options(priority=1)
