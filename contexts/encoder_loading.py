"""Load an encoder from its folder or from the model hub. Only libraries import this module."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import cached_file

from stoker.contexts import ambient
from stoker.contexts.compiling import compile_runtime
from stoker.contexts.encoding import EncoderModel, RuntimeShape
from stoker.contexts.model_source import read_sentence_facts
from stoker.contexts.streamed_model import StreamedWeights, computation_dtype, hide_transformers_progress_bar
from stoker.units import show_seconds

log = logging.getLogger(__name__)


def load_encoder(
    path: str, *, dtype: str = "auto", threads: int = 0, length: int = 0, batch: int = 1, compiled: bool | str = "auto"
) -> EncoderModel:
    """Load the encoder at `path` on this library's device. For the other arguments, see `encoder`."""
    began = time.monotonic()
    if threads:
        torch.set_num_threads(threads)
    hide_transformers_progress_bar()
    device = ambient.device()
    more: dict[str, Any] = {"local_files_only": True} if Path(path).exists() else {}
    config = AutoConfig.from_pretrained(path, **more)
    classifies = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    kind = AutoModelForSequenceClassification if classifies else AutoModel
    with StreamedWeights(
        path, dtype=computation_dtype(dtype, path=path, device=device), devices=(device,), **more
    ) as weights:
        tokenizer = AutoTokenizer.from_pretrained(path, **more)
        facts = read_sentence_facts(lambda name: _read_model_file(path, name))
        network = weights.build_model(kind)
    took = show_seconds(time.monotonic() - began)
    log.info("encoder %s on %s in %s: %s %s", path, device, network.dtype, took, weights.told)
    runtime = RuntimeShape(length, batch) if length else None
    model = EncoderModel(
        network.eval().requires_grad_(False), tokenizer, facts=facts, name=Path(path).name,
        source=ambient.cached_object_name(path) or path, runtime=runtime,
    )  # fmt: skip
    if runtime is not None:
        compile_runtime(model, compiled)
    return model


def _read_model_file(path: str, name: str) -> str | None:
    try:
        place = Path(path, name) if Path(path).exists() else Path(cached_file(path, name) or "")
        return place.read_text()
    except OSError:
        return None
