"""Facts about a model before it is loaded. This module imports no GPU library."""

from __future__ import annotations

import json
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
"""Modules that a pilot imports for every ready-made model, so that all share one zygote."""


class CallableModule(types.ModuleType):
    """A module that can be called like its function of the same name: a package may bind the name to either."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[self.__name__.rpartition(".")[2]](*args, **kwargs)


def model_source(path: str) -> tuple[str, bool]:
    """Return the path or hub name to load, and True if the model is local. Raises RecipeError."""
    local = Path(path)
    if local.suffix == ".safetensors" and local.is_file():
        if not (local.parent / "config.json").is_file():
            raise RecipeError(
                f"{local} has no config.json in its folder, which describes the model; copy the model's config.json and"
                " tokenizer files there",
                path=path,
            )
        local = local.parent
    if local.is_dir() and not (local / "config.json").is_file():
        gguf = sorted(local.glob("*.gguf"))
        if len(gguf) != 1:
            what = f"{len(gguf)} GGUF files (give the path of one)" if gguf else "neither config.json nor a GGUF file"
            raise RecipeError(f"{local} contains {what}, so it is not a model folder", path=path)
        local = gguf[0]
    if local.is_file() and local.suffix != ".gguf":
        raise RecipeError(
            f"{local} is neither .gguf nor .safetensors; give a file of one of these kinds, or a folder", path=path
        )
    if local.exists():
        return str(local), True
    if local.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1 or local.suffix == ".gguf":
        raise RecipeError(f"there is no model at {path}; check the path", path=path)
    return path, False


def architectures(source: str) -> tuple[str, ...]:
    named = read_json_object(source, "config.json").get("architectures")
    return tuple(name for name in named or () if isinstance(name, str) and name.isidentifier())


_ENCODERS = (
    "Albert", "Bert", "Camembert", "Deberta", "DebertaV2", "DistilBert", "Electra", "Ernie", "ModernBert", "MPNet",
    "NomicBert", "Roberta", "XLMRoberta",
)  # fmt: skip
_ENCODERS_END = (
    "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "EncoderModel",
)  # fmt: skip


def encoder_class(source: str) -> str:
    """Return the model class in an encoder's folder, or "" for another kind of model.

    Args:
        source: The folder.
    """
    names = architectures(source)
    bare = {f"{name}Model" for name in _ENCODERS}
    return names[0] if names and all(name in bare or name.endswith(_ENCODERS_END) for name in names) else ""


def shown_name(path: str) -> str:
    """Return a short name of a model for users: `SmolLM2-135M.Q4_K_M`.

    Args:
        path: Folder or file of the model, or its name on the hub.
    """
    name = Path(path).name or Path(path).parent.name
    return name.removesuffix(".gguf").removesuffix(".safetensors")[:40] or "llm"


UNDECLARED_CACHE_TOKENS = 4096
"""Maximum cache tokens if the memory is undeclared."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MOST = 1 << 24


def can_split_heads_evenly(source: str, devices: int) -> bool:
    """True if a model's attention heads are unknown, or divide evenly among `devices`."""
    return _number(read_json_object(source, "config.json"), "num_attention_heads") % devices == 0


def check_device_split(source: str, devices: Any, *, engine: str) -> None:
    """Raise RecipeError if a local model cannot be split over `devices`."""
    if type(devices) is not int or devices < 2:
        return  # `Needs` validates the number
    config = read_json_object(source, "config.json")
    layers = _number(config, "num_hidden_layers")
    problem = ""
    if engine == "vllm" and not can_split_heads_evenly(source, devices):
        heads = _number(config, "num_attention_heads")
        problem = f"vLLM splits the {heads} attention heads evenly; write a number that divides {heads}"
    elif engine != "vllm" and 0 < layers < devices:
        problem = f"the model has {layers} layers, and each device needs one; write {layers} or less"
    if problem:
        raise RecipeError(f"causal_lm(devices={devices}) for {shown_name(source)}: {problem}", option="devices")


def add_token_cache_to_needs(needs: Needs, source: str, *, dtype: str) -> Needs:
    """Return the needs of a model including its cache, if its size is known."""
    config = read_json_object(source, "config.json")
    on_cpu = not needs.kinds or "cpu" in needs.kinds
    token_bytes, longest = _token_bytes(config, dtype=dtype, on_cpu=on_cpu), _number(config, "max_position_embeddings")
    if not token_bytes or not longest:
        return needs
    declared = needs.device_memory_bytes or needs.memory_bytes  # if both are declared, the GPU memory counts
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


def _token_bytes(config: Any, *, dtype: str, on_cpu: bool) -> int:
    layers, heads = _number(config, "num_hidden_layers"), _number(config, "num_attention_heads")
    width = _number(config, "head_dim") or (_number(config, "hidden_size") // heads if heads else 0)
    own = dtype
    if dtype == "auto":
        own = "float32" if on_cpu else str(config.get("torch_dtype") or config.get("dtype"))
    return 2 * layers * (_number(config, "num_key_value_heads") or heads) * width * _DTYPE_BYTES.get(own, 4)


def _number(config: Any, name: str) -> int:
    found = config.get(name) if isinstance(config, dict) else None
    return found if type(found) is int and 0 < found <= _MOST else 0


_FILE = "tokenizer.json"


class TokenCounter:
    """Counts the tokens of a text, of a pair (a tuple), or of the longest text in a list, up to `most` (0: no limit)."""

    def __init__(self, source: str, *, most: int = 0) -> None:
        self._source = source
        self._most = most
        self._lock = threading.Lock()
        self._tokenizer: Any = None

    def __call__(self, given: Any) -> int:
        if isinstance(given, list):
            return max(map(self._count, given), default=0)
        return self._count(given)

    def _count(self, text: Any) -> int:
        parts = (text,) if isinstance(text, str) else text
        if not isinstance(parts, tuple) or not 1 <= len(parts) <= 2 or not all(isinstance(part, str) for part in parts):
            raise RecipeError(
                f"the tokens of {text!r:.60} cannot be counted: the function's first argument must be a text, a pair"
                ' of texts or a list of these; else call it with its length, features={"input_length": ...}'
            )
        with self._lock:
            count = len(self._opened().encode(*parts).ids)
        return min(count, self._most) if self._most else count

    def encode(self, text: str, *, special: bool = True) -> tuple[list[int], list[str]]:
        """Return the tokens of a text and their names, with special tokens if `special`."""
        with self._lock:
            found = self._opened().encode(text, add_special_tokens=special)
            return list(found.ids), list(found.tokens)

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens. Raises ValueError for an unknown token."""
        with self._lock:
            tokenizer = self._opened()
            for id in ids:
                if tokenizer.id_to_token(id) is None:
                    raise ValueError(f"token {id} is not in the model's vocabulary")
            return str(tokenizer.decode(ids, skip_special_tokens=False))

    def _opened(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = _read(self._source)
        return self._tokenizer


def token_counter(path: str, *, most: int = 0) -> TokenCounter:
    """Return a `TokenCounter` for a model.

    Args:
        path: A folder or a name on the model hub.
        most: Maximum count; 0: no limit.
    """
    return TokenCounter(str(path), most=most)


def _read(source: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise RecipeError(f"tokens cannot be counted here ({error}): pip install tokenizers") from None
    try:
        tokenizer = Tokenizer.from_file(str(_file_of(source)))
    except Exception as error:  # the package raises plain exceptions
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


POOLINGS = ("mean", "cls", "last")
_NAMES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
}
_MODULES = ("Transformer", "Pooling", "Normalize")

Read = Callable[[str], str | None]
"""Returns the text of a model's file by name, or None."""


class SentenceFacts(msgspec.Struct, frozen=True):
    """Facts about a sentence encoder. `longest`: maximum tokens of a text. `trouble`: why its pooling is not supported."""

    pooling: str = "mean"
    longest: int = 0
    trouble: str = ""


def read_sentence_facts(read: Read) -> SentenceFacts:
    modules = _object(read("modules.json"), list)
    types = [str(each.get("type", "")).rpartition(".")[2] for each in modules or () if isinstance(each, dict)]
    other = [name for name in types if name not in _MODULES]
    trouble = f"its modules.json lists {', '.join(other)}, which is not computed here" if other else ""
    folder = "1_Pooling"
    for each, name in zip(modules or (), types, strict=False):
        if name == "Pooling":
            folder = str(each.get("path") or folder)
    pooling, more = _parse_pooling(_object(read(f"{folder}/config.json"), dict))
    longest = (_object(read("sentence_bert_config.json"), dict) or {}).get("max_seq_length")
    return SentenceFacts(pooling, longest if type(longest) is int and longest > 0 else 0, trouble or more)


def _parse_pooling(config: dict[str, Any] | None) -> tuple[str, str]:
    if config is None:
        return "mean", ""
    asked = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    named = config.get("pooling_mode")
    asked = asked or ([named] if isinstance(named, str) else list(named or ()))
    known = [_NAMES[name] for name in asked if name in _NAMES]
    if len(asked) == len(known) == 1:
        return known[0], ""
    return (
        "mean",
        f"its pooling is {' and '.join(map(str, asked)) or 'not named'}, and not one of {', '.join(POOLINGS)}",
    )


def _object(text: str | None, kind: type[Any]) -> Any:
    try:
        found = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, kind) else None


SHORTEST_RUNTIME = 3
"""Two special tokens and one token of text."""
_NO_LIMIT = 1_000_000
"""A tokenizer's limit above this number means no limit."""
_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert"})
"""Model types whose positions begin after the padding token's position."""


def max_text_tokens(*, model_type: str, positions: int, padding: int, tokenizer: int, sentences: int) -> int:
    """Return the maximum tokens of a text; 0 = unlimited."""
    if positions and model_type in _OFFSET_POSITIONS:
        positions -= padding + 1
    limits = (sentences, positions, tokenizer if tokenizer < _NO_LIMIT else 0)
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
    return _number(config, "max_position_embeddings") or _number(config.get("text_config"), "max_position_embeddings")


def read_max_text_tokens(folder: str) -> int:
    """Return `max_text_tokens` of the model in a folder; 0 for a hub name."""
    config, tokenizer = read_json_object(folder, "config.json"), read_json_object(folder, "tokenizer_config.json")
    return max_text_tokens(
        model_type=str(config.get("model_type", "")),
        positions=_number(config, "max_position_embeddings"),
        padding=_number(config, "pad_token_id"),
        tokenizer=_number(tokenizer, "model_max_length"),
        sentences=read_sentence_facts(lambda name: _text(folder, name)).longest,
    )


def read_json_object(folder: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] | None = _object(_text(folder, name), dict)
    return found or {}


def _text(folder: str, name: str) -> str | None:
    try:
        return Path(folder, name).read_text()
    except (OSError, UnicodeDecodeError):
        return None
