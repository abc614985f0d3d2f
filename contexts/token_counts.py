"""How many tokens a text has for a model, told without the model: by the `tokenizers` library and `tokenizer.json`.

A login node counts the tokens of a call's texts so that the call goes to a runtime that is long enough. It counts those
that the tokenizer puts around a text, as `EncoderModel.count_tokens` does.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from stoker.errors import RecipeError

_FILE = "tokenizer.json"


class TokenCounter:
    """Counts the tokens of a text, of a pair of texts (a tuple), or of the longest of a list of these. The tokenizer
    is read at the first count. `most`: a text that is longer counts as this long (0: it does not)."""

    def __init__(self, source: str, *, most: int = 0) -> None:
        self._source = source
        self._most = most
        self._lock = threading.Lock()
        self._tokenizer: Any = None

    def __call__(self, given: Any) -> int:
        """The tokens of what a call is given; 0 for an empty list. Raises RecipeError for what is no text, and for a
        model whose tokenizer cannot be read."""
        if isinstance(given, list):
            return max(map(self._count, given), default=0)
        return self._count(given)

    def _count(self, text: Any) -> int:
        parts = (text,) if isinstance(text, str) else text
        if not isinstance(parts, tuple) or not 1 <= len(parts) <= 2 or not all(isinstance(part, str) for part in parts):
            raise RecipeError(
                f"the tokens of {text!r:.60} cannot be counted: the function's first argument has to be a text, a pair"
                ' of texts or a list of these; else call it with its length, features={"input_length": ...}'
            )
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _read(self._source)
            count = len(self._tokenizer.encode(*parts).ids)
        return min(count, self._most) if self._most else count


def token_counter(path: str, *, most: int = 0) -> TokenCounter:
    """A `TokenCounter` for the model at `path`, a folder or a name on the hub."""
    return TokenCounter(str(path), most=most)


def _read(source: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise RecipeError(f"tokens cannot be counted here ({error}): pip install tokenizers") from None
    try:
        tokenizer = Tokenizer.from_file(str(_file_of(source)))
    except Exception as error:  # the library raises plain exceptions
        raise RecipeError(
            f"the tokenizer of {source} cannot be read ({error}): tokens are counted by its {_FILE}, which"
            " save_pretrained of a fast tokenizer writes",
            path=source,
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _file_of(source: str) -> Path:
    if Path(source).exists():
        return Path(source, _FILE)
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(source, _FILE))
