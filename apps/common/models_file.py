"""Read models.toml, the models of `stoker serve` and `stoker batch`. docs/serve.md shows the settings.

Formats of function calls (`tool_parser`): hermes, llama3_json, mistral, qwen3_xml and json. Formats of reasoning
(`reasoning_parser`): deepseek_r1, mistral, seed_oss, and none if reasoning is part of the answer. The default depends
on the chat template.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

import stoker
from stoker.apps.common.answer_parsing import REASONING_PARSERS
from stoker.apps.common.data_rows import read_text_file
from stoker.apps.common.openai_requests import ApiRequest, Endpoint
from stoker.apps.common.tool_calls import FORMATS
from stoker.config import Duration, Size
from stoker.contexts import EngineSettings, Recipe, check_adapter, encoder_class, longest_input
from stoker.decoding import read_text
from stoker.errors import ConfigError, RecipeError
from stoker.toml_files import read_struct

_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16", "half")
LONGEST_OBJECTIVE_S = 86_400.0
_ADAPTER_SETTINGS = frozenset({"base", "adapter", "ttft", "tpot", "cold"})
"""Names of the settings that an adapter may have."""
_TEXT_SETTINGS = (
    "engine", "graphs", "devices", "tpot", "tool_parser", "reasoning_parser", "max_model_len", "chat_template",
    "quantization", "vllm",
)  # fmt: skip
"""Names of the settings that an embedding model does not have."""
_CHOICES: dict[str, tuple[str, ...]] = {
    "engine": ("auto", "transformers", "continuous", "static", "vllm"), "dtype": _DTYPES,
    "tool_parser": ("auto", *FORMATS), "reasoning_parser": ("auto", *REASONING_PARSERS),
}  # fmt: skip


class ModelKind(enum.Enum):
    CHAT = "chat"
    """A model that generates texts: `/v1/chat/completions` and `/v1/completions`."""
    EMBEDDING = "embedding"
    """A model that returns vectors: `/v1/embeddings`."""


class ColdRequestAction(enum.Enum):
    """What the gateway does with requests for a model that is not loaded."""

    WAIT = "wait"
    REFUSE = "refuse"
    """The request gets HTTP status 503, and the model is loaded for later requests."""


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one model. Sizes are in bytes (0 = not given), times in seconds."""

    path: str = ""
    kind: ModelKind = ModelKind.CHAT
    engine: str = "auto"
    graphs: bool = False
    devices: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    dtype: str = "auto"
    memory: Size = Size(0)
    device_memory: Size = Size(0)
    ttft: Duration | None = None
    tpot: Duration | None = None
    min: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    max: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    keep_alive: Duration | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    cold: ColdRequestAction | None = None
    """None: a request is refused only if the load would take longer than `ttft`."""
    max_model_len: Annotated[int, msgspec.Meta(ge=1)] | None = None
    chat_template: str = ""
    quantization: str = ""
    vllm: dict[str, Any] = {}

    base: str = ""
    """The base model of an adapter. Settings that an adapter cannot have are those of the base."""
    adapter: str = ""
    adapters: dict[str, str] = {}
    """Folders of all adapters of this model or of its base, by name. Users cannot set this field."""

    def __post_init__(self) -> None:
        if bool(self.base) != bool(self.adapter):
            raise ValueError("base and adapter belong together; write both, or leave both out")
        if not self.path and not self.base:
            raise ValueError("path is missing or empty; name a folder or a file")
        for name, known in _CHOICES.items():
            if (given := getattr(self, name)) not in known:
                raise ValueError(f"{name} = {given!r} is not available; there are {', '.join(known)}")
        for name in _TEXT_SETTINGS if self.kind is ModelKind.EMBEDDING else ():
            if getattr(self, name) != getattr(_PLAIN, name):
                raise ValueError(f"{name} is for models that generate text; leave it out for an embedding model")
        if self.quantization and "quantization" in self.vllm:
            raise ValueError("quantization is given twice: here and in vllm; leave one out")
        try:
            self.engine_settings.check(engine=self.engine)
        except RecipeError as error:
            raise ValueError(str(error)) from None
        if self.graphs and self.devices > 1:
            raise ValueError("graphs = true supports only one device; leave out graphs or devices")
        if self.graphs and self.engine in ("static", "vllm"):
            raise ValueError(f'graphs = true is for engine = "continuous"; {self.engine} does not support it')
        for name, objective in (("ttft", self.ttft), ("tpot", self.tpot)):
            if objective is not None and not 0 < objective <= LONGEST_OBJECTIVE_S:
                raise ValueError(f"{name} must be more than 0 and at most a day; leave it out for no objective")
        if self.max is not None and self.min > self.max:
            raise ValueError(f"min = {self.min} is more than max = {self.max}")

    @property
    def engine_settings(self) -> EngineSettings:
        own = {"quantization": self.quantization} if self.quantization else {}
        return EngineSettings(self.max_model_len or 0, self.chat_template, {**own, **self.vllm})


_PLAIN = ModelSettings(path="-")


def apply_parser_settings(request: ApiRequest, settings: ModelSettings | None) -> ApiRequest:
    if settings is None or request.endpoint is not Endpoint.CHAT:
        return request
    named = {"tool_parser": settings.tool_parser, "reasoning_parser": settings.reasoning_parser}
    return msgspec.structs.replace(request, **{name: each for name, each in named.items() if each != "auto"})


class _ModelsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: dict[str, ModelSettings]


def read_models(path: Path) -> dict[str, ModelSettings]:
    text = read_text_file(path, hint="; docs/serve.md shows an example")
    return parse_models(text, file=str(path), folder=path.absolute().parent)


def parse_models(text: str, *, file: str, folder: Path) -> dict[str, ModelSettings]:
    """Parse a models file. Paths are relative to `folder`. Raises ConfigError."""
    found = read_struct(text, _ModelsFile, file=file).models
    if not found:
        raise ConfigError(f"{file}: names no model; write [models.NAME] and its path", file=file)
    placed = {
        name: _load_chat_template(_make_paths_absolute(settings, folder), folder, at=f"{file}: [models.{name}]")
        for name, settings in found.items()
    }
    models = _link_adapters_to_bases(placed, file=file)
    for name, settings in models.items():
        for key, problem in _find_model_problems(settings):
            raise ConfigError(f"{file}: [models.{name}] {problem}", file=file, key=key)
    return models


def _find_model_problems(settings: ModelSettings) -> Iterator[tuple[str, str]]:
    longest, most = longest_input(settings.path, writes=True), settings.max_model_len or 0
    if 0 < longest < most:
        yield "max_model_len", f"max_model_len = {most} is more than the {longest} tokens of the model"
    if settings.kind is ModelKind.CHAT and (encoder := encoder_class(settings.path)):
        why = f"is an encoder ({encoder}), which generates no text"
        yield "kind", f'{settings.path} {why}; write kind = "embedding"'


def model_digest_or_name(recipe: Recipe, path: str = "") -> str:
    return ", ".join(part.name for part in recipe.objects) or path


def make_recipe_from_settings(settings: ModelSettings) -> Recipe:
    """Return the recipe of a model's context. Equal settings give equal recipes. Raises RecipeError."""
    options: dict[str, Any] = {
        "dtype": settings.dtype, "memory": _format_size_in_bytes(settings.memory),
        "device_memory": _format_size_in_bytes(settings.device_memory), "min_libraries": settings.min,
        "max_libraries": settings.max, "keep_alive": settings.keep_alive,
    }  # fmt: skip
    if settings.kind is ModelKind.EMBEDDING:
        return stoker.encoder(settings.path, **options)
    return stoker.causal_lm(
        settings.path, engine=settings.engine, graphs=settings.graphs, devices=settings.devices,
        adapters=_find_usable_adapters(settings), **msgspec.structs.asdict(settings.engine_settings), **options,
    )  # fmt: skip


def _find_usable_adapters(settings: ModelSettings) -> dict[str, str]:
    """Return the usable adapters of the model, and the adapter of `settings` even if it is unusable."""
    found = {}
    for name, folder in settings.adapters.items():
        try:
            check_adapter(folder, base=settings.path)
        except ValueError:
            if folder != settings.adapter:
                continue
        found[name] = folder
    return found


def _link_adapters_to_bases(models: dict[str, ModelSettings], *, file: str) -> dict[str, ModelSettings]:
    """Copy the settings of a base model to its adapters, and the list of adapters to the base and each adapter."""
    of_base: dict[str, dict[str, str]] = {}
    for name, settings in models.items():
        if settings.adapters:
            why = "adapters is not a setting; write [models.NAME] with base and adapter for each adapter"
            raise ConfigError(f"{file}: [models.{name}] {why}", file=file, key="adapters")
        if settings.base:
            if why := _find_adapter_problem(settings, models):
                raise ConfigError(f"{file}: [models.{name}] {why}", file=file, key="base")
            of_base.setdefault(settings.base, {})[name] = settings.adapter
    found = {}
    for name, settings in models.items():
        shared = of_base.get(settings.base or name, {})
        own = {each: getattr(settings, each) for each in _ADAPTER_SETTINGS} if settings.base else {}
        found[name] = msgspec.structs.replace(models[settings.base or name], adapters=shared, **own)
    return found


def _find_adapter_problem(settings: ModelSettings, models: dict[str, ModelSettings]) -> str:
    """Return why these settings of an adapter are invalid, or an empty string."""
    base = models.get(settings.base)
    if base is None:
        return f"base = {settings.base!r} is not a model of this file; its models are {', '.join(models)}"
    if base.base:
        return f"base = {settings.base!r} is itself an adapter; name its base, {base.base}"
    if base.kind is ModelKind.EMBEDDING:
        return f"base = {settings.base!r} computes embeddings; an adapter needs a model that generates text"
    if base.engine == "static":
        text = f'base = {settings.base!r} has engine = "{base.engine}", which does not support adapters'
        return f"{text}; leave out the engine"
    for field in msgspec.structs.fields(ModelSettings):
        usual = getattr(_PLAIN, field.name) if field.name != "path" else ""
        if field.name not in _ADAPTER_SETTINGS and getattr(settings, field.name) != usual:
            return f"{field.name} is a setting of the base; write it at [models.{settings.base}]"
    try:
        check_adapter(settings.adapter, base=base.path)
    except ValueError as error:
        return f"adapter: {error}"
    return ""


def _format_size_in_bytes(size: Size) -> str | None:
    return f"{int(size)} B" if size else None


def _make_paths_absolute(settings: ModelSettings, folder: Path) -> ModelSettings:
    """Make the paths absolute. A missing path is kept, because it may be a name on the model hub."""
    if settings.base:
        adapter = os.path.abspath(folder / os.path.expanduser(settings.adapter))
        return msgspec.structs.replace(settings, adapter=adapter)
    path = os.path.expanduser(settings.path)
    there = folder / path
    looks_local = path.startswith((".", "/")) or there.exists()
    return msgspec.structs.replace(settings, path=os.path.abspath(there) if looks_local else settings.path)


def _load_chat_template(settings: ModelSettings, folder: Path, *, at: str) -> ModelSettings:
    named = settings.chat_template
    if not named or "{" in named:
        return settings
    try:
        text = read_text(folder / os.path.expanduser(named))
    except OSError as error:
        said = f"{at} chat_template: {named} cannot be read: {error.strerror}; write the name of a file, or the text"
        raise ConfigError(said, key="chat_template") from None
    return msgspec.structs.replace(settings, chat_template=text)
