"""The options of a batch, and the choice of a model for each request: by name from `--model NAME=PATH` or `--models
FILE`, else from `--model PATH`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from pathlib import Path

import msgspec

import stoker
from stoker.apps.common.models_file import ModelKind, ModelSettings, make_recipe_from_settings
from stoker.apps.common.models_file import read_models as read_models_file
from stoker.apps.common.openai_requests import ApiRequest, Endpoint, RequestRefused
from stoker.contexts import Recipe
from stoker.errors import ConfigError

EXAMPLE = Path(__file__).parent / "data" / "requests.jsonl"


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a batch. An empty string, or 0 for `max_tokens`, selects the default."""

    file: str = ""
    models: tuple[str, ...] = ()
    models_file: str = ""
    max_tokens: int = 0
    engine: str = "auto"
    site: str = ""
    session: str = ""
    out: str = ""
    fresh: bool = False
    permits: str = ""
    """The file in which a gateway writes how many calls of the run may start."""

    @property
    def file_path(self) -> Path:
        return Path(self.file) if self.file else EXAMPLE

    def format_command(self) -> str:
        words = ["stoker", "batch", *([self.file] if self.file else [])]
        words += [word for model in self.models for word in ("--model", model)]
        words += ["--models", self.models_file] if self.models_file else []
        words += ["--max-tokens", str(self.max_tokens)] if self.max_tokens else []
        words += ["--engine", self.engine] if self.engine != "auto" else []
        for name in ("site", "session", "out"):
            words += [f"--{name}", getattr(self, name)] if getattr(self, name) else []
        return shlex.join(words)


class ModelPaths(msgspec.Struct, frozen=True):
    """Models of a batch. `named`: paths by the names in requests; `every`: path for other names (empty: refuse)."""

    named: dict[str, str]
    every: str = ""
    settings: dict[str, ModelSettings] = {}
    engine: str = "auto"
    """Engine of the models that have no entry in the models file."""

    def path_for_name(self, name: str) -> str:
        return self.named.get(name, self.every)

    def check_model(self, request: ApiRequest) -> None:
        """Raise RequestRefused for a request that no model can answer."""
        if not self.path_for_name(request.model):
            said = f"model {request.model} has no --model option (the options name {', '.join(self.named)})"
            raise RequestRefused(said, param="model", code="model_not_found", status=404)
        settings = self.settings.get(request.model)
        if settings is not None and (settings.kind is ModelKind.EMBEDDING) != (request.endpoint is Endpoint.EMBEDDINGS):
            kind = "makes embeddings" if settings.kind is ModelKind.EMBEDDING else "writes texts"
            raise RequestRefused(f"model {request.model} {kind}", param="model", code="model_mismatch")

    def make_recipe(self, name: str, endpoint: Endpoint) -> Recipe:
        if name in self.settings:
            return make_recipe_from_settings(self.settings[name])
        if endpoint is Endpoint.EMBEDDINGS:
            return stoker.encoder(self.path_for_name(name))
        return stoker.causal_lm(self.path_for_name(name), engine=self.engine)


def read_models(given: Iterable[str], *, file: str = "", engine: str = "auto") -> ModelPaths:
    """Read a models file and the values of `--model` options (`given`). `engine` applies to the models of `given`."""
    settings = read_models_file(Path(file)) if file else {}
    named = {name: each.path for name, each in settings.items()}
    every = ""
    for text in given:
        name, equals, path = text.partition("=")
        # A path may contain an equals sign, so an existing path does not count as NAME=PATH.
        if not equals or os.path.exists(text):
            name, path = "", text
        if not path or (equals and not name and path != text):
            raise ConfigError(f"--model {text}: write --model PATH, or --model NAME=PATH", key="model")
        if name in named or (not name and every):
            which = f"{name} is" if name else "two models are"
            raise ConfigError(f"--model {text}: {which} given twice; each name has one model", key="model")
        path = str(Path(path).absolute()) if os.path.exists(path) else path
        if name:
            named[name] = path
        else:
            every = path
    return ModelPaths(named=named, every=every, settings=settings, engine=engine)
