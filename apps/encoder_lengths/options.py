"""The options of a run that measures the latency of an encoder by text length."""

from __future__ import annotations

import msgspec

COMPILED: dict[str, bool | str] = {"auto": "auto", "yes": True, "no": False}
"""The argument `compiled` of `encoder`, for each value of the option `--compiled`."""


class LengthsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a profile. An empty string selects the default. `step`: tokens between two lengths."""

    model: str = ""
    texts: str = ""
    text: str = "text"
    site: str = ""
    step: int = 0
    dtype: str = "auto"
    compiled: str = "auto"
