"""What `stoker.load` and `StokerExecutor` are given, checked before anything is started."""

from __future__ import annotations

import os
from typing import Any

from parsl.providers.base import ExecutionProvider

from stoker.errors import ConfigError

LONGEST_S = 1e9


def check_options(*, label: Any, session: Any, working_dir: Any, drain_s: Any, provider: Any) -> None:
    """Raises ConfigError, naming the option, for a value that would be of no use much later."""
    if not isinstance(label, str) or not label or "/" in label:
        raise ConfigError(f"label: {label!r:.80} is not a name: write a text without slashes; it names a folder, too")
    for name, path in (("session", session), ("working_dir", working_dir)):
        if path is not None and not isinstance(path, str | os.PathLike):
            what = "the id or the folder of a session" if name == "session" else "the path of a folder"
            raise ConfigError(f"{name}: {path!r:.80} is not {what}")
    number = isinstance(drain_s, int | float) and not isinstance(drain_s, bool)
    if not number or not 0 <= drain_s <= LONGEST_S:
        raise ConfigError(f"drain_s: {drain_s!r:.80} is not a number of seconds, 0 or more")
    if provider is not None and not isinstance(provider, ExecutionProvider):
        raise ConfigError(
            f"provider: {provider!r:.80} is not a provider of Parsl's; a batch system is named in a site file:"
            " stoker.load('site.toml')"
        )
