"""What a batch can be told."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

EXAMPLE = Path(__file__).parent / "data" / "requests.jsonl"


class BatchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one batch. Empty texts are not given; `max_tokens` 0 is what OpenAI writes."""

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
    """A file that says how many calls may begin (pacing.py)."""

    @property
    def path(self) -> Path:
        """The request file: the shipped example when none was given."""
        return Path(self.file) if self.file else EXAMPLE

    def command(self) -> str:
        """The command line that goes on with this batch."""
        words = ["stoker", "batch", *([self.file] if self.file else [])]
        words += [word for model in self.models for word in ("--model", model)]
        words += ["--models", self.models_file] if self.models_file else []
        words += ["--max-tokens", str(self.max_tokens)] if self.max_tokens else []
        words += ["--engine", self.engine] if self.engine != "auto" else []
        for name in ("site", "session", "out"):
            words += [f"--{name}", getattr(self, name)] if getattr(self, name) else []
        return shlex.join(words)
