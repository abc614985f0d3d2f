from __future__ import annotations

import shutil

import pytest
from adapter_folders import write_tiny_lora
from tiny_model import write_tiny_model

from stoker.apps.common.models_file import make_recipe_from_settings, parse_models
from stoker.errors import ConfigError, RecipeError

BASE = '[models.small]\npath = "tiny"\nmin = 1\nttft = "1 s"\n'
LEGAL = '[models.legal]\nbase = "small"\nadapter = "lora"\n'


@pytest.fixture
def folder(tmp_path):
    write_tiny_model(tmp_path / "tiny")
    write_tiny_lora(tmp_path / "lora", seed=1)
    return tmp_path


def parsed(text, folder):
    return parse_models(text, file="models.toml", folder=folder)


def test_adapters_share_the_context_of_their_base(folder):
    write_tiny_lora(folder / "other", seed=2)
    found = parsed(f'{LEGAL}tpot = "2 s"\n{BASE}[models.more]\nbase = "small"\nadapter = "other"\n', folder)
    assert len({make_recipe_from_settings(each).key for each in found.values()}) == 1
    assert make_recipe_from_settings(found["small"]).limits.least == 1
    assert make_recipe_from_settings(parsed(BASE, folder)["small"]).key != make_recipe_from_settings(found["small"]).key
    assert [(each.ttft, each.tpot, each.base) for each in found.values()] == [
        (None, 2.0, "small"), (1.0, None, ""), (None, None, "small"),
    ]  # fmt: skip


def test_adapter_with_missing_files_does_not_fail_other_adapters(folder):
    write_tiny_lora(folder / "other", seed=2)
    found = parsed(f'{BASE}{LEGAL}[models.more]\nbase = "small"\nadapter = "other"\n', folder)
    shutil.rmtree(folder / "other")
    assert make_recipe_from_settings(found["small"]).key == make_recipe_from_settings(found["legal"]).key
    with pytest.raises(RecipeError, match=r"more: .*other is not a PEFT adapter: it has no adapter_config\.json"):
        make_recipe_from_settings(found["more"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[models.a]\nbase = "small"\n', "[models.a] base and adapter belong together"),
        ('[models.a]\nadapter = "lora"\n', "[models.a] base and adapter belong together"),
        ('[models.a]\nbase = "smal"\nadapter = "lora"\n', "'smal' is not a model of this file; its models are small"),
        (f'{LEGAL}[models.a]\nbase = "legal"\nadapter = "lora"\n', "is itself an adapter; name its base, small"),
        (f'{LEGAL}memory = "1 GB"\n', "memory is a setting of the base; write it at [models.small]"),
        (f'{LEGAL}path = "tiny"\n', "path is a setting of the base"),
        ('[models.a]\nbase = "small"\nadapter = "tiny"\n', "is not a PEFT adapter"),
        ('[models.a]\nbase = "small"\nadapter = "wide"\n', "down_proj of layer 0 maps 64 to 32 numbers, but 64 to 64"),
        ('[models.a]\nbase = "v"\nadapter = "lora"\n[models.v]\npath = "tiny"\nengine = "static"\n', "not support"),
        (
            '[models.a]\nbase = "v"\nadapter = "lora"\n[models.v]\npath = "tiny"\nkind = "embedding"\n',
            "base = 'v' computes embeddings",
        ),
        ('[models.a]\npath = "tiny"\nadapters = {b = "lora"}\n', "adapters is not a setting"),
    ],
)  # fmt: skip
def test_invalid_adapter_settings_are_refused(folder, text, said):
    write_tiny_lora(folder / "wide", seed=1, width=32)
    with pytest.raises(ConfigError) as error:
        parsed(BASE + text, folder)
    assert said in str(error.value)
