"""A node without internet and a model that lies on the model hub: a load that fails at once, and says what to do.

`huggingface_hub` asks again six times a file, for half a minute each, before a loader hears that there is no network.
So while a loader runs, its log is read: when it says that the hub cannot be reached at all (no such name, no route,
refused, or no connection in time), the library works from local files from then on, as with `HF_HUB_OFFLINE=1`. A
model in the cache still loads; one that is not there fails with the hub's own error, and `advice` says how to bring it.

Nothing is imported here, and nothing is asked: a loader that needs no hub costs nothing.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from typing import Any
from urllib.parse import urlsplit

ANSWER_S = 4
"""How long the hub may take to answer about a file, where the environment does not say."""

_UNREACHABLE = re.compile(
    r"\[Errno (-2|-3|-5|101|111|113)\]|Name or service not known|name resolution|Network is unreachable"
    r"|No route to host|Connection refused",
    re.IGNORECASE,
)
_AGAIN = "No local file found. Retrying"
"""Said when the hub gave no answer to the first question about a file; the second one waits for a minute, six times."""
_CONNECT_S = 2.0
"""A hub that takes no connection for so long is behind a firewall; one that is merely slow takes it."""
_REQUESTING = "thrown while requesting"


class HubWatch(logging.Handler):
    """Reads the log of `huggingface_hub`. `unreachable` is the first record that says there is no way to the hub."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._files = logging.getLogger("huggingface_hub.file_download")
        self._level = self._files.level
        self.unreachable = ""

    def __enter__(self) -> HubWatch:
        os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(ANSWER_S))
        constants = _constants()
        if constants is not None and os.environ["HF_HUB_ETAG_TIMEOUT"] == str(ANSWER_S):
            constants.HF_HUB_ETAG_TIMEOUT = ANSWER_S  # the zygote has imported it before
        self._files.setLevel(logging.INFO)
        logging.getLogger("huggingface_hub").addHandler(self)
        return self

    def __exit__(self, *_error: object) -> None:
        logging.getLogger("huggingface_hub").removeHandler(self)
        self._files.setLevel(self._level)

    def emit(self, record: logging.LogRecord) -> None:
        """If a record says that the hub cannot be reached, nothing more is asked of it."""
        text = record.getMessage()
        constants = _constants()
        if self.unreachable or constants is None:
            return
        if os.environ.get("HF_HUB_OFFLINE") == "0":  # the user insists
            return
        refused = _REQUESTING in text and _UNREACHABLE.search(text) is not None
        if not refused and not (_AGAIN in text and not _takes_connections(constants.ENDPOINT)):
            return
        self.unreachable = text
        constants.HF_HUB_OFFLINE = True

    def advice(self, error: BaseException) -> str:
        """What to do about a loader's error, if it may come of a hub that cannot be reached; else empty."""
        if not self.unreachable and not _is_offline_error(error):
            return ""
        return (
            "this node does not reach the model hub, and the model is not in its cache; where there is internet, run"
            " `hf download NAME --local-dir models/NAME` and load that folder (listed in the context's files it travels"
            ' to every pilot, causal_lm("models/NAME") does that by itself), or set HF_HOME to a cache that nodes see'
        )


def _takes_connections(url: str) -> bool:
    """True if a connection to a URL's host can be made in little time, or only a proxy could tell."""
    if any(os.environ.get(name) for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "ALL_PROXY")):
        return True
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_S):
            return True
    except (OSError, ValueError):
        return False


def _is_offline_error(error: BaseException) -> bool:
    """True if an error, or one that it was raised from, is the hub's own word that it may not be asked."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if type(at).__name__ in ("OfflineModeIsEnabled", "LocalEntryNotFoundError"):
            return True
        at = at.__cause__ or at.__context__
    return False


def _constants() -> Any:
    return sys.modules.get("huggingface_hub.constants")
