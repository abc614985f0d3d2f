"""How long the input of a call to a family is: what its features say, else what the family counts in its first argument
(that after the context)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from stoker.contexts.encoder_runtimes import Family
from stoker.errors import ConfigError
from stoker.protocol.calls import Features


def is_countable(features: Features | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the length can be told now: the first argument is no future."""
    return _said(features) > 0 or not isinstance(_first(args, kwargs), Future)


def input_length(family: Family, features: Features | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """In tokens. Raises ConfigError where nothing says it."""
    said = _said(features)
    if said:
        return said
    if family.count is None:
        raise ConfigError(
            "a call to a family says how long its input is: write family(..., count=function of the first argument)"
            ' or features={"input_length": tokens}',
            key="features",
        )
    return family.count(_first(args, kwargs))


def _said(features: Features | None) -> int:
    return features.input_length if features is not None else 0


def _first(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)
