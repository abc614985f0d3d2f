"""What stays hot: recipes, their names and digests, the files they need, and ready-made contexts.

Each name is resolved on first use: importing this package imports nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "Awareness": "stoker.contexts.recipe",
    "CausalLM": "stoker.contexts.language_model",
    "EncoderModel": "stoker.contexts.encoding",
    "EncoderProfile": "stoker.contexts.length_profiles",
    "Evicted": "stoker.contexts.ambient",
    "Family": "stoker.contexts.encoder_runtimes",
    "Gang": "stoker.contexts.ambient",
    "Needs": "stoker.contexts.recipe",
    "ObjectRef": "stoker.contexts.recipe",
    "Recipe": "stoker.contexts.recipe",
    "RecipeFactory": "stoker.contexts.factory",
    "RuntimeLengths": "stoker.contexts.length_profiles",
    "as_recipe": "stoker.contexts.factory",
    "causal_lm": "stoker.contexts.causal_lm",
    "context": "stoker.contexts.factory",
    "default_model": "stoker.contexts.causal_lm",
    "device": "stoker.contexts.ambient",
    "devices": "stoker.contexts.ambient",
    "dtype_named": "stoker.contexts.causal_lm",
    "encoder": "stoker.contexts.encoder",
    "encoder_class": "stoker.contexts.model_source",
    "encoder_family": "stoker.contexts.encoder_runtimes",
    "engine_options": "stoker.contexts.causal_lm",
    "family": "stoker.contexts.encoder_runtimes",
    "gang": "stoker.contexts.ambient",
    "keep_encoder_profile": "stoker.contexts.length_profiles",
    "kept_encoder_profile": "stoker.contexts.length_profiles",
    "lengths_that_pay": "stoker.contexts.length_profiles",
    "load_causal_lm": "stoker.contexts.causal_lm",
    "longest_input": "stoker.contexts.encoder_facts",
    "load_variable_from_serverless": "stoker.contexts.ambient",
    "local_path": "stoker.contexts.ambient",
    "model_recipe": "stoker.contexts.causal_lm",
    "progress": "stoker.contexts.ambient",
    "recipe_of": "stoker.contexts.factory",
    "saved_state": "stoker.contexts.ambient",
    "scratch": "stoker.contexts.ambient",
    "state_folder": "stoker.contexts.folders",
    "token_counter": "stoker.contexts.model_source",
}

__all__ = [
    "Awareness",
    "CausalLM",
    "EncoderModel",
    "EncoderProfile",
    "Evicted",
    "Family",
    "Gang",
    "Needs",
    "ObjectRef",
    "Recipe",
    "RecipeFactory",
    "RuntimeLengths",
    "as_recipe",
    "causal_lm",
    "context",
    "default_model",
    "device",
    "devices",
    "dtype_named",
    "encoder",
    "encoder_class",
    "encoder_family",
    "engine_options",
    "family",
    "gang",
    "keep_encoder_profile",
    "kept_encoder_profile",
    "lengths_that_pay",
    "load_causal_lm",
    "load_variable_from_serverless",
    "local_path",
    "longest_input",
    "model_recipe",
    "progress",
    "recipe_of",
    "saved_state",
    "scratch",
    "state_folder",
    "token_counter",
]

if TYPE_CHECKING:
    from stoker.contexts.ambient import (
        Evicted,
        Gang,
        device,
        devices,
        gang,
        load_variable_from_serverless,
        local_path,
        progress,
        saved_state,
        scratch,
    )
    from stoker.contexts.causal_lm import (
        causal_lm,
        default_model,
        dtype_named,
        engine_options,
        load_causal_lm,
        model_recipe,
    )
    from stoker.contexts.encoder import encoder
    from stoker.contexts.encoder_facts import longest_input
    from stoker.contexts.encoder_runtimes import Family, encoder_family, family
    from stoker.contexts.encoding import EncoderModel
    from stoker.contexts.factory import RecipeFactory, as_recipe, context, recipe_of
    from stoker.contexts.folders import state_folder
    from stoker.contexts.language_model import CausalLM
    from stoker.contexts.length_profiles import (
        EncoderProfile,
        RuntimeLengths,
        keep_encoder_profile,
        kept_encoder_profile,
        lengths_that_pay,
    )
    from stoker.contexts.model_source import encoder_class, token_counter
    from stoker.contexts.recipe import Awareness, Needs, ObjectRef, Recipe


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'stoker.contexts' has no attribute {name!r}") from None
    module = importlib.import_module(home)
    # `causal_lm` and `encoder` are modules of this package and functions in them: the import has set the module.
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
