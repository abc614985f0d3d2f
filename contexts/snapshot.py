"""Load a Transformers model, and store a converted copy that loads faster.

A *snapshot* is the output of `save_pretrained` in the dtype of the computation, so a load need not dequantize a GGUF
file. One process converts the model while others wait. Other pilots find a snapshot by its *form*, a digest of source
and dtype.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import snapshot_download

from stoker import locks
from stoker.contexts import ambient
from stoker.contexts.folders import snapshot_folder
from stoker.contexts.objects import make_object_ref
from stoker.units import show_seconds

log = logging.getLogger(__name__)

_FORMAT_VERSIONS = {"file": 2, "folder": 1}
"""Versions of the snapshot format, by kind of source. Version 1 of `file` (GGUF) had wrong special tokens."""
_FACTS_FILE = "stoker-snapshot.json"
_MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


class LoadedModel(NamedTuple):
    model: Any
    tokenizer: Any
    weights: str = ""


def load_model_and_tokenizer(
    path: str, *, dtype: Any, devices: tuple[str, ...], snapshot: bool = True, name: str = ""
) -> tuple[LoadedModel, str]:
    """Return the loaded model with its tokenizer, and a text about their origin.

    With several `devices`, split the model's layers over them.
    """
    if snapshot and _is_worth_converting(path):
        return _load_through_snapshot(path, dtype=dtype, devices=devices, name=name)
    return _load_with_transformers(path, dtype=dtype, devices=devices), "as it is"


def prepare_weights_folder(path: str, *, dtype: Any, name: str = "") -> tuple[str, str]:
    """Return a folder with the model's safetensors files, and a text about their origin."""
    if not os.path.exists(path):
        return str(snapshot_download(path, allow_patterns=_MODEL_FILES)), "from the model hub"
    if not _is_worth_converting(path):
        return path, "as it is"
    place = snapshot_path(name or make_object_ref(path).name, dtype=str(dtype))
    if received := find_received_snapshot(place):
        return str(received[0]), _describe_received(received[1])
    made = make_snapshot(place, lambda: _load_with_transformers(path, dtype=dtype, devices=("cpu",)), source=path)
    return str(place), _offer_snapshot(place, is_new=made)


def find_received_snapshot(place: Path) -> tuple[Path, float] | None:
    """Return the folder of a snapshot that another pilot sent, and how many seconds its creation took. Return None
    without such a snapshot, or if `place` already has one.
    """
    came = ambient.local_path(place.name)
    if snapshot_creation_seconds(place) is not None or (made_s := snapshot_creation_seconds(came)) is None:
        return None
    return came, made_s


def _offer_snapshot(place: Path, *, is_new: bool) -> str:
    made_s = snapshot_creation_seconds(place) or 0.0
    ambient.offer_snapshot(place.name, place, made_s=made_s)
    return f"snapshot ({'just made' if is_new else 'made earlier'} in {show_seconds(made_s)})"


def snapshot_path(name: str, *, dtype: str) -> Path:
    kind, _, digest = name.partition(".")[0].partition("-")
    return snapshot_folder() / f"{kind}-{digest[:40]}-{dtype.removeprefix('torch.')}-{_FORMAT_VERSIONS.get(kind, 1)}"


def make_snapshot(place: Path, load: Callable[[], tuple[Any, ...]], *, source: str) -> bool:
    def write(draft: Path) -> None:
        model, tokenizer, *_ = load()
        # A loaded GGUF model has plain weights, but Transformers marks it as quantized and would refuse to save it.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)

    return create_snapshot_folder(place, write, source=source)


def create_snapshot_folder(
    place: Path, write: Callable[[Path], None], *, source: str, made_s: float | None = None
) -> bool:
    """Create the folder `place` atomically from a draft that `write` fills. Return True if this process created it.

    `made_s`: seconds to record as the creation time, if `write` only copies. Raises OSError and exceptions of `write`.
    """
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(place.with_name(place.name + ".lock"), "a") as lock:
        locks.wait_for_lock(lock.fileno())
        if snapshot_creation_seconds(place) is not None:
            return False
        for left in place.parent.glob(f".{place.name}.*"):
            log.warning("removing %s, which a dead process left", left)
            shutil.rmtree(left, ignore_errors=True)
        draft = place.with_name(f".{place.name}.{os.getpid()}")
        began = time.monotonic()
        try:
            draft.mkdir(mode=0o700)
            write(draft)
            took_s = time.monotonic() - began if made_s is None else made_s
            (draft / _FACTS_FILE).write_text(json.dumps({"source": source, "made_s": round(took_s, 3)}))
            _flush_to_disk(draft)  # otherwise files could contain zeros after a crash of the machine
            draft.rename(place)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    log.info("made the snapshot %s of %s in %s; the next load uses it", place, source, show_seconds(took_s))
    return True


def rename_damaged_snapshot(place: Path) -> Path:
    aside = place.with_name(f"{place.name}.damaged-{time.time_ns()}")
    with contextlib.suppress(OSError):
        place.rename(aside)
    return aside


def _flush_to_disk(folder: Path) -> None:
    for file in filter(Path.is_file, folder.rglob("*")):
        with file.open("rb") as written:
            os.fdatasync(written.fileno())


def _load_through_snapshot(path: str, *, dtype: Any, devices: tuple[str, ...], name: str) -> tuple[LoadedModel, str]:
    place = snapshot_path(name or make_object_ref(path).name, dtype=str(dtype))
    if received := find_received_snapshot(place):
        came, made_s = received
        try:
            return _load_with_transformers(str(came), dtype=dtype, devices=devices), _describe_received(made_s)
        except Exception as error:
            log.warning("the snapshot %s of another pilot cannot be loaded (%s); a new snapshot is made", came, error)
    for _ in range(2):
        try:
            made = make_snapshot(
                place, lambda: _load_with_transformers(path, dtype=dtype, devices=("cpu",)), source=path
            )
        except OSError as error:
            log.warning(
                "a snapshot of %s cannot be stored in %s (%s); the model is loaded without one",
                path,
                place.parent,
                error,
            )
            break
        try:
            loaded = _load_with_transformers(str(place), dtype=dtype, devices=devices)
        except Exception as error:
            aside = rename_damaged_snapshot(place)
            log.warning("cannot load the snapshot %s (%s); it is now %s and is made again", place, error, aside.name)
        else:
            return loaded, _offer_snapshot(place, is_new=made)
    return _load_with_transformers(path, dtype=dtype, devices=devices), "without a snapshot"


def _describe_received(made_s: float) -> str:
    return f"snapshot (another pilot made it in {show_seconds(made_s)})"


def snapshot_creation_seconds(place: Path) -> float | None:
    """Return the seconds that a snapshot's creation took, or None."""
    try:
        return float(json.loads((place / _FACTS_FILE).read_text()).get("made_s", 0.0))
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return None


def _load_with_transformers(path: str, *, dtype: Any, devices: tuple[str, ...]) -> LoadedModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from stoker.contexts.streamed_model import StreamedWeights

    place, more = path, dict[str, Any]()
    is_gguf = path.endswith(".gguf")
    if is_gguf:
        place, more["gguf_file"] = os.path.split(os.path.abspath(path))
    if os.path.exists(path):
        more["local_files_only"] = True
    try:
        with StreamedWeights(place, dtype=dtype, devices=devices, **more) as weights:
            tokenizer = AutoTokenizer.from_pretrained(place, **more)
            model = weights.build_model(AutoModelForCausalLM)
    except OSError as error:
        if os.path.exists(path):
            raise
        raise OSError(f"{path} is not a file or folder here, and the model hub did not send it: {error}") from None
    if is_gguf:
        _correct_special_tokens(tokenizer, model.config)
    return LoadedModel(model.eval().requires_grad_(False), tokenizer, weights.told)


def _correct_special_tokens(tokenizer: Any, config: Any) -> None:
    """Correct the special tokens of a model from a GGUF file: Transformers 5.17 sets a wrong end token for SmolLM2."""
    for kind in ("bos", "eos", "pad"):
        named = getattr(config, f"{kind}_token_id", None)
        if named in tokenizer.added_tokens_decoder and getattr(tokenizer, f"{kind}_token_id") != named:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(named))


def _is_worth_converting(path: str) -> bool:
    if path.endswith(".gguf"):
        return os.path.isfile(path)
    return os.path.isdir(path) and not any(Path(path).glob("*.safetensors"))
