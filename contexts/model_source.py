"""Find facts about a model without loading it. This module imports no GPU library."""

from __future__ import annotations

import functools
import json
import os
import re
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from stoker.contexts.recipe import Needs
from stoker.errors import RecipeError

MODEL_PRELOAD = (
    "torch", "transformers", "stoker.contexts.model_loading", "stoker.contexts.streamed_model",
    "stoker.contexts.encoder_loading", "transformers:AutoModelForCausalLM", "transformers:AutoModel",
    "transformers:AutoTokenizer", "transformers:AutoConfig", "transformers:DynamicCache",
)  # fmt: skip
"""Modules that a pilot preimports for every ready-made model. These models share one zygote (parent process)."""


class CallableModule(types.ModuleType):
    """A module that can be called like its function of the same name, because a package's attribute of this name may be
    the module or the function.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[self.__name__.rpartition(".")[2]](*args, **kwargs)


def find_model_source(path: str) -> tuple[str, bool]:
    """Return the path or hub name to load, and True if the model is local. Raises RecipeError."""
    local = Path(path)
    if local.suffix == ".safetensors" and local.is_file():
        if not (local.parent / "config.json").is_file():
            why = "has no config.json in its folder; copy the model's config.json and tokenizer files there"
            raise RecipeError(f"{local} {why}", path=path)
        local = local.parent
    if local.is_dir() and not (local / "config.json").is_file():
        gguf = sorted(local.glob("*.gguf"))
        if len(gguf) != 1:
            what = f"{len(gguf)} GGUF files (give the path of one)" if gguf else "neither config.json nor a GGUF file"
            raise RecipeError(f"{local} contains {what}, so it is not a model folder", path=path)
        local = gguf[0]
    if local.is_file() and local.suffix != ".gguf":
        raise RecipeError(f"{local} is neither .gguf nor .safetensors, nor a folder", path=path)
    if local.exists():
        return str(local), True
    if local.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1 or local.suffix == ".gguf":
        raise RecipeError(f"there is no model at {path}; check the path", path=path)
    return path, False


_ENCODER_ARCHITECTURES = (
    "Albert", "Bert", "Camembert", "Deberta", "DebertaV2", "DistilBert", "Electra", "Ernie", "ModernBert", "MPNet",
    "NomicBert", "Roberta", "XLMRoberta",
)  # fmt: skip
_ENCODER_CLASS_SUFFIXES = (
    "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "EncoderModel",
)  # fmt: skip


def encoder_class(source: str) -> str:
    """Return the model class in an encoder's folder, or "" for another kind of model.

    Args:
        source: The folder.
    """
    named = read_json_object(source, "config.json").get("architectures")
    names = [name for name in named or () if isinstance(name, str) and name.isidentifier()]
    bare = {f"{name}Model" for name in _ENCODER_ARCHITECTURES}
    return names[0] if names and all(name in bare or name.endswith(_ENCODER_CLASS_SUFFIXES) for name in names) else ""


def shown_name(path: str) -> str:
    """Return a short name of a model for users: `SmolLM2-135M.Q4_K_M`.

    Args:
        path: Folder or file of the model, or its name on the hub.
    """
    name = Path(path).name or Path(path).parent.name
    return name.removesuffix(".gguf").removesuffix(".safetensors")[:40] or "llm"


UNDECLARED_CACHE_TOKENS = 4096
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MAX_NUMBER = 1 << 24


def can_split_heads_evenly(source: str, devices: int) -> bool:
    """True if a model's attention heads are unknown, or divide evenly among `devices`."""
    return _read_positive_number(read_json_object(source, "config.json"), "num_attention_heads") % devices == 0


def check_device_split(source: str, devices: Any, *, engine: str) -> None:
    """Raise RecipeError if a local model cannot be split over `devices`."""
    if type(devices) is not int or devices < 2:
        return  # other code reports an invalid number of devices
    config, problem = read_json_object(source, "config.json"), ""
    layers, heads = (
        _read_positive_number(config, "num_hidden_layers"),
        _read_positive_number(config, "num_attention_heads"),
    )
    if engine == "vllm" and heads % devices:
        problem = f"vLLM splits the {heads} attention heads evenly; write a number that divides {heads}"
    elif engine != "vllm" and 0 < layers < devices:
        problem = f"the model has {layers} layers, and each device needs one; write {layers} or less"
    if problem:
        raise RecipeError(f"causal_lm(devices={devices}) for {shown_name(source)}: {problem}", option="devices")


def add_token_cache_to_needs(needs: Needs, source: str, *, dtype: str) -> Needs:
    """Return the needs with the size of the model's key-value cache, if its config file tells the size."""
    config = read_json_object(source, "config.json")
    on_cpu = not needs.kinds or "cpu" in needs.kinds
    token_bytes, longest = (
        _bytes_per_token(config, dtype=dtype, on_cpu=on_cpu),
        _read_positive_number(config, "max_position_embeddings"),
    )
    if not token_bytes or not longest:
        return needs
    declared = needs.device_memory_bytes or needs.memory_bytes  # on a GPU: without a GPU limit, use the host's limit
    if on_cpu:
        declared = max(needs.memory_bytes, needs.device_memory_bytes)
    try:
        weights = sum(file.stat().st_size for file in Path(source).glob("*.safetensors"))
    except OSError:
        return needs
    # Each device stores its share of the weights and of each token.
    token_bytes, weights = -(-token_bytes // needs.devices), weights // needs.devices
    room = max(0, declared - weights) // token_bytes if declared else UNDECLARED_CACHE_TOKENS
    return msgspec.structs.replace(needs, token_bytes=token_bytes, cache_tokens=min(longest, room))


def _bytes_per_token(config: Any, *, dtype: str, on_cpu: bool) -> int:
    layers, heads = (
        _read_positive_number(config, "num_hidden_layers"),
        _read_positive_number(config, "num_attention_heads"),
    )
    width = _read_positive_number(config, "head_dim") or (
        _read_positive_number(config, "hidden_size") // heads if heads else 0
    )
    own = dtype
    if dtype == "auto":
        own = "float32" if on_cpu else str(config.get("torch_dtype") or config.get("dtype"))
    return (
        2 * layers * (_read_positive_number(config, "num_key_value_heads") or heads) * width * _DTYPE_BYTES.get(own, 4)
    )


def _read_positive_number(config: Any, name: str) -> int:
    found = config.get(name) if isinstance(config, dict) else None
    return found if type(found) is int and 0 < found <= _MAX_NUMBER else 0


_TOKENIZER_FILE = "tokenizer.json"


class TokenCounter:
    """Counts the tokens of a text, of a pair of texts (a tuple), or of the longest text in a list. `most`: maximum
    result (0: no limit).
    """

    def __init__(self, source: str, *, most: int = 0) -> None:
        self._source = source
        self._most = most
        self._lock = threading.Lock()

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return _load_tokenizer(self._source)

    def __call__(self, given: Any) -> int:
        return max(map(self._count, given), default=0) if isinstance(given, list) else self._count(given)

    def _count(self, text: Any) -> int:
        parts = (text,) if isinstance(text, str) else text
        if not isinstance(parts, tuple) or not 1 <= len(parts) <= 2 or not all(isinstance(part, str) for part in parts):
            raise RecipeError(
                f"the tokens of {text!r:.60} cannot be counted: the function's first argument must be a text, a pair"
                ' of texts or a list of these; or give the length of the input, features={"input_length": ...}'
            )
        with self._lock:
            count = len(self._tokenizer.encode(*parts).ids)
        return min(count, self._most) if self._most else count

    def encode(self, text: str, *, special: bool = True) -> tuple[list[int], list[str]]:
        """Return the token ids of a text and the names of these tokens. `special`: whether to add special tokens."""
        with self._lock:
            found = self._tokenizer.encode(text, add_special_tokens=special)
        return list(found.ids), list(found.tokens)

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens. Raises ValueError for an unknown token."""
        with self._lock:
            for id in ids:
                if self._tokenizer.id_to_token(id) is None:
                    raise ValueError(f"token {id} is not in the model's vocabulary")
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def token_counter(path: str, *, most: int = 0) -> TokenCounter:
    """Return a `TokenCounter` for a model.

    Args:
        path: A folder or a name on the model hub.
        most: Maximum count; 0: no limit.
    """
    return TokenCounter(str(path), most=most)


def _load_tokenizer(source: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise RecipeError(f"tokens cannot be counted here ({error}): pip install tokenizers") from None
    try:
        if os.path.exists(source):
            file = os.path.join(source, _TOKENIZER_FILE)
        else:
            from huggingface_hub import hf_hub_download

            file = hf_hub_download(source, _TOKENIZER_FILE)
        tokenizer = Tokenizer.from_file(file)
    except Exception as error:  # `tokenizers` raises plain `Exception`
        why = f"Stoker counts tokens with its {_TOKENIZER_FILE}, which save_pretrained of a fast tokenizer writes"
        raise RecipeError(f"the tokenizer of {source} cannot be read ({error}): {why}", path=source) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


POOLINGS = ("mean", "cls", "last")

Read = Callable[[str], str | None]
"""Function that returns the text of a model's file by name, or None."""


class SentenceFacts(msgspec.Struct, frozen=True):
    """Facts about an encoder. `longest`: maximum tokens of a text. `trouble`: why the encoder is not supported."""

    pooling: str = "mean"
    longest: int = 0
    trouble: str = ""


def read_sentence_facts(read: Read) -> SentenceFacts:
    modules = [each for each in _parse_json(read("modules.json"), list) or () if isinstance(each, dict)]
    types = [str(each.get("type", "")).rpartition(".")[2] for each in modules]
    other = [name for name in types if name not in ("Transformer", "Pooling", "Normalize")]
    trouble = f"its modules.json lists {', '.join(other)}, which Stoker does not compute" if other else ""
    folders = [
        str(each.get("path") or "1_Pooling") for each, name in zip(modules, types, strict=True) if name == "Pooling"
    ]
    pooling, more = _parse_pooling(_parse_json(read(f"{[*folders, '1_Pooling'][0]}/config.json"), dict))
    longest = (_parse_json(read("sentence_bert_config.json"), dict) or {}).get("max_seq_length")
    return SentenceFacts(pooling, longest if type(longest) is int and longest > 0 else 0, trouble or more)


def _parse_pooling(config: dict[str, Any] | None) -> tuple[str, str]:
    if config is None:
        return "mean", ""
    named = config.get("pooling_mode")
    asked = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    asked = asked or ([named] if isinstance(named, str) else list(named or ()))
    short = [re.sub(r"^pooling_mode_|_tokens?$|token$", "", str(name)) for name in asked]
    if len(short) == 1 and short[0] in POOLINGS:
        return short[0], ""
    what = " and ".join(map(str, asked)) or "not named"
    return "mean", f"its pooling is {what}, and not one of {', '.join(POOLINGS)}"


def _parse_json(text: str | None, kind: type[Any]) -> Any:
    try:
        found = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, kind) else None


SHORTEST_RUNTIME = 3
"""Minimum length of a runtime: two special tokens and one token of text."""
_TOKENIZER_NO_LIMIT = 1_000_000
_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert"})
"""Model types whose positions begin after the padding token's position."""


def max_text_tokens(*, model_type: str, positions: int, padding: int, tokenizer: int, sentences: int) -> int:
    """Return the maximum tokens of a text; 0 = unlimited."""
    if positions and model_type in _OFFSET_POSITIONS:
        positions -= padding + 1
    limits = (sentences, positions, tokenizer if tokenizer < _TOKENIZER_NO_LIMIT else 0)
    return min((limit for limit in limits if limit > 0), default=0)


def longest_input(path: str, *, writes: bool = False) -> int:
    """Return the maximum tokens of a model's input; 0 if unknown.

    Args:
        path: Folder or file of the model.
        writes: True for a language model, False for an encoder.
    """
    there = Path(path)
    folder = str(there if there.is_dir() else there.parent)
    if there.suffix == ".gguf" or not there.exists():
        return 0
    if not writes:
        return read_max_text_tokens(folder)
    config = read_json_object(folder, "config.json")
    return _read_positive_number(config, "max_position_embeddings") or _read_positive_number(
        config.get("text_config"), "max_position_embeddings"
    )


def read_max_text_tokens(folder: str) -> int:
    config, tokenizer = read_json_object(folder, "config.json"), read_json_object(folder, "tokenizer_config.json")
    return max_text_tokens(
        model_type=str(config.get("model_type", "")),
        positions=_read_positive_number(config, "max_position_embeddings"),
        padding=_read_positive_number(config, "pad_token_id"),
        tokenizer=_read_positive_number(tokenizer, "model_max_length"),
        sentences=read_sentence_facts(lambda name: _read_text_or_none(folder, name)).longest,
    )


def read_json_object(folder: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] | None = _parse_json(_read_text_or_none(folder, name), dict)
    return found or {}


def _read_text_or_none(folder: str, name: str) -> str | None:
    try:
        return Path(folder, name).read_text()
    except (OSError, UnicodeDecodeError):
        return None
