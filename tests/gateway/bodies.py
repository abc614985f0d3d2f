from __future__ import annotations

from pydantic import BaseModel


def strict(read: BaseModel) -> BaseModel:
    """Return the parsed body; fail on unknown fields."""
    assert not list(_unknown(read, type(read).__name__))
    return read


def _unknown(value, place):
    if isinstance(value, BaseModel):
        yield from (f"{place}.{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), f"{place}.{name}")
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _unknown(one, f"{place}[{number}]")
