"""Where a model lies and what it is called: what the recipes of ready-made models have in common."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

from stoker.errors import RecipeError


class CallableModule(types.ModuleType):
    """A module with the name of its function. Calling it calls the function: of a module and a function of one name
    Python puts whichever was imported last into the package."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function of its name answers."""
        return vars(self)[self.__name__.rpartition(".")[2]](*args, **kwargs)


def model_source(path: str) -> tuple[str, bool]:
    """What to load, and whether it lies here. A checkpoint file stands for the folder that it is in. Raises RecipeError
    for a path that is no model's."""
    local = Path(path)
    if local.suffix == ".safetensors" and local.is_file():
        if not (local.parent / "config.json").is_file():
            raise RecipeError(
                f"{local} has no config.json beside it, which says what model it is; copy the model's config.json and"
                " tokenizer files there",
                path=path,
            )
        local = local.parent
    if local.is_dir() and not (local / "config.json").is_file():
        gguf = sorted(local.glob("*.gguf"))
        if len(gguf) != 1:
            what = f"{len(gguf)} GGUF files (name one)" if gguf else "neither config.json nor a GGUF file"
            raise RecipeError(f"{local} holds {what}, so it is no model folder", path=path)
        local = gguf[0]
    if local.is_file() and local.suffix != ".gguf":
        raise RecipeError(f"{local} is neither .gguf nor .safetensors; name such a file, or a folder", path=path)
    if local.exists():
        return str(local), True
    if local.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1 or local.suffix == ".gguf":
        raise RecipeError(f"there is no model at {path}; check the path", path=path)
    return path, False


def architectures(source: str) -> tuple[str, ...]:
    """The names of a model folder's classes in Transformers; none where its config.json does not tell them."""
    try:
        named = json.loads((Path(source) / "config.json").read_text()).get("architectures")
    except (OSError, ValueError, RecursionError, AttributeError):
        return ()
    return tuple(name for name in named or () if isinstance(name, str) and name.isidentifier())


_ENCODERS = (
    "Albert", "Bert", "Camembert", "Deberta", "DebertaV2", "DistilBert", "Electra", "Ernie", "ModernBert", "MPNet",
    "NomicBert", "Roberta", "XLMRoberta",
)  # fmt: skip
_ENCODERS_END = (
    "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "EncoderModel",
)  # fmt: skip


def encoder_class(source: str) -> str:
    """The class of a model folder whose model is an encoder for certain, and writes no text; empty for others."""
    names = architectures(source)
    bare = {f"{name}Model" for name in _ENCODERS}
    return names[0] if names and all(name in bare or name.endswith(_ENCODERS_END) for name in names) else ""


def shown_name(path: str) -> str:
    """A short name for people: `SmolLM2-135M` of `models/SmolLM2-135M.Q4_K_M.gguf`."""
    name = Path(path).name or Path(path).parent.name
    return name.removesuffix(".gguf").removesuffix(".safetensors")[:40] or "llm"
