"""Recipes, the digests and files of recipes, and ready-made contexts.

Each name is imported on first use, so importing this package imports no GPU library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.startup import import_on_first_use

_NAMES = {
    "adapter_files": "check_adapter",
    "ambient": (
        "Evicted Gang RelayedTexts device devices gang load_variable_from_serverless local_path progress saved_state"
        " scratch"
    ),
    "causal_lm": "causal_lm default_model dtype_named load_causal_lm model_recipe",
    "encoder": "Family encoder encoder_family family",
    "encoding": "EncoderModel",
    "engine_settings": "EngineSettings",
    "factory": "RecipeFactory as_recipe context recipe_of",
    "folders": "may_be_shared state_folder",
    "language_model": "CausalLM",
    "length_profiles": "EncoderProfile RuntimeLengths keep_encoder_profile kept_encoder_profile lengths_that_pay",
    "model_source": "encoder_class longest_input shown_name token_counter",
    "recipe": "Awareness Needs ObjectRef Recipe",
}
__getattr__ = import_on_first_use("stoker.contexts", _NAMES)

__all__ = [
    "Awareness", "CausalLM", "EncoderModel", "EncoderProfile", "EngineSettings", "Evicted", "Family", "Gang", "Needs",
    "ObjectRef", "Recipe", "RecipeFactory", "RelayedTexts", "RuntimeLengths", "as_recipe", "causal_lm",
    "check_adapter", "context", "default_model", "device", "devices", "dtype_named", "encoder", "encoder_class",
    "encoder_family", "family", "gang", "keep_encoder_profile", "kept_encoder_profile", "lengths_that_pay",
    "load_causal_lm", "load_variable_from_serverless", "local_path", "longest_input", "may_be_shared", "model_recipe",
    "progress", "recipe_of", "saved_state", "scratch", "shown_name", "state_folder", "token_counter",
]  # fmt: skip

if TYPE_CHECKING:
    from stoker.contexts.adapter_files import check_adapter
    from stoker.contexts.ambient import (
        Evicted,
        Gang,
        RelayedTexts,
        device,
        devices,
        gang,
        load_variable_from_serverless,
        local_path,
        progress,
        saved_state,
        scratch,
    )
    from stoker.contexts.causal_lm import causal_lm, default_model, dtype_named, load_causal_lm, model_recipe
    from stoker.contexts.encoder import Family, encoder, encoder_family, family
    from stoker.contexts.encoding import EncoderModel
    from stoker.contexts.engine_settings import EngineSettings
    from stoker.contexts.factory import RecipeFactory, as_recipe, context, recipe_of
    from stoker.contexts.folders import may_be_shared, state_folder
    from stoker.contexts.language_model import CausalLM
    from stoker.contexts.length_profiles import (
        EncoderProfile,
        RuntimeLengths,
        keep_encoder_profile,
        kept_encoder_profile,
        lengths_that_pay,
    )
    from stoker.contexts.model_source import encoder_class, longest_input, shown_name, token_counter
    from stoker.contexts.recipe import Awareness, Needs, ObjectRef, Recipe


def __dir__() -> list[str]:
    return __all__
