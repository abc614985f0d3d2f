"""Count the requests and tokens of a batch, from its log during the run and from its output files at the end."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.common.batch_state import OK
from stoker.apps.gateway.usage import UsageCount

_MOST_BYTES = 8_000_000


class _Tokens(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    model: str = ""
    usage: _Tokens | None = None


class _Response(msgspec.Struct):
    status_code: int
    body: _Body


class _Line(msgspec.Struct):
    """A line of an output file, or of a log, which contains the output line in its field `line`."""

    custom_id: str | None = None
    response: _Response | None = None
    line: _Line | None = None


class _BatchRequest(msgspec.Struct):
    body: dict[str, Any]
    custom_id: str | None = None


class BatchReader:
    """`requests`: the input file; `log`: the answers of the running batch; `models`: the models to count."""

    def __init__(self, requests: Path, log: Path, *, models: Collection[str]) -> None:
        self.totals: dict[str, UsageCount] = {}
        self._requests = requests
        self._log = log
        self._models = models
        self._at = 0
        self._requested_models: dict[str, str] | None = None

    def read_log(self) -> bool:
        """Add new lines of the log. Return True if more may follow immediately."""
        lines = []
        with suppress(FileNotFoundError), self._log.open("rb") as log:
            log.seek(self._at)
            read = 0
            for line in log:
                if not line.endswith(b"\n"):
                    break
                lines.append(line)
                read += len(line)
                if read >= _MOST_BYTES:
                    break
            self._at += read
        self._add(lines)
        return bool(lines)

    def read_files(self, *files: Path) -> None:
        """Count these output files instead of the log."""
        self.totals = {}
        for file in files:
            with suppress(FileNotFoundError), file.open("rb") as lines:
                self._add(lines)

    def _add(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                found = msgspec.json.decode(line, type=_Line)
                found = found.line or found
                if found.response is not None:
                    self._count(found.response, custom_id=found.custom_id or "")

    def _count(self, response: _Response, *, custom_id: str) -> None:
        body, failed = response.body, response.status_code != OK
        model = self._asked_model(custom_id) if failed else body.model
        if model in self._models:
            tokens = body.usage or _Tokens()
            count = UsageCount(1, tokens.prompt_tokens, tokens.completion_tokens, failed=failed)
            self.totals.setdefault(model, UsageCount()).add(count)

    def _asked_model(self, custom_id: str) -> str:
        """Return the model from the input file, because an error does not name it."""
        if self._requested_models is None:
            self._requested_models = {}
            with suppress(FileNotFoundError), self._requests.open("rb") as lines:
                for line in lines:
                    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                        found = msgspec.json.decode(line, type=_BatchRequest)
                        self._requested_models[found.custom_id or ""] = str(found.body.get("model", ""))
        return self._requested_models.get(custom_id, "")
