"""Which model answers a request: `--model PATH` for all, `--model NAME=PATH` for those that ask for NAME."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from stoker.apps.batch_inference.request import BatchRequest, RequestRefused
from stoker.errors import ConfigError


class ModelPaths(msgspec.Struct, frozen=True):
    """The path of each model by the name that requests ask for. `every`: of all other names; empty: of none."""

    named: dict[str, str]
    every: str = ""

    def path_of(self, name: str) -> str:
        """Where the model lies that answers to this name; empty: nowhere."""
        return self.named.get(name, self.every)

    def admit(self, request: BatchRequest) -> None:
        """Raise RequestRefused for a request that none of these models answers."""
        if not self.path_of(request.model):
            known = ", ".join(self.named)
            raise RequestRefused(
                f"body.model {request.model} is none of the models that --model names ({known})",
                param="model",
                code="model_not_found",
                status=404,
            )


def read_models(given: Iterable[str]) -> ModelPaths:
    """What the `--model` options say. Raises ConfigError for a name, or a model for all, that is given twice."""
    named: dict[str, str] = {}
    every = ""
    for text in given:
        name, equals, path = text.partition("=")
        # A path may have an equals sign in it; a model's name has no slash before one that is meant to be a name.
        if not equals or os.path.exists(text):
            name, path = "", text
        if not path or (equals and not name and path != text):
            raise ConfigError(f"--model {text}: write --model PATH, or --model NAME=PATH", key="model")
        if name in named or (not name and every):
            which = f"{name} is" if name else "two models are"
            raise ConfigError(f"--model {text}: {which} given twice; each name has one model", key="model")
        if name:
            named[name] = _absolute(path)
        else:
            every = _absolute(path)
    return ModelPaths(named=named, every=every)


def _absolute(path: str) -> str:
    """What is not here may be a name on the model hub."""
    return str(Path(path).absolute()) if os.path.exists(path) else path
