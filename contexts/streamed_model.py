"""Loads a model of Transformers onto a GPU from a stream of its weights (`weight_stream`).

Transformers builds the model around tensors that are on the device already: it renames keys, ties weights and computes
buffers as it always does, and copies nothing. Where a folder is unusual, or anything fails, Transformers reads the
weights itself, so errors are its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, modeling_utils
from transformers.models.auto import auto_factory

from stoker.contexts.weight_stream import WeightStream, stored_tensors

log = logging.getLogger(__name__)

BY_TRANSFORMERS = "weights by Transformers"


class UnusualModelError(Exception):
    """Why the weights of a model are not streamed."""


class StreamedWeights:
    """The weights of a model, which a stream brings to the device; or why none does. Use it in a `with` block.

    The stream starts when the block is entered, so that a tokenizer can load meanwhile.
    """

    def __init__(self, place: str, *, dtype: Any, device: str, **more: Any) -> None:
        """Prepare to load the model at `place`, a folder or a hub name; `more` is for `from_pretrained`."""
        self._place = place
        self._dtype = dtype
        self._device = device
        self._more = more
        self._stream: WeightStream | None = None
        self._config: Any = None
        self._scope = contextlib.ExitStack()
        self.told = ""
        """How the weights came, for people; empty for a CPU, where they are mapped from the file."""

    def __enter__(self) -> StreamedWeights:
        if not streams_to(self._device):
            return self
        try:
            self._begin()
        except Exception as error:
            self._note(error)
        return self

    def __exit__(self, *_: object) -> None:
        self._scope.close()

    def model(self, kind: Any) -> Any:
        """Return the model; `kind` is an Auto class of Transformers.

        Raises the error of Transformers for a model that it cannot read.
        """
        if self._stream is not None:
            try:
                model = self._around_stream(kind, self._stream)
                self.told = self._stream.told()
                return model
            except Exception as error:
                self._note(error)
        more = dict(self._more)
        if self._device != "cpu":
            more["device_map"] = {"": self._device}
        return kind.from_pretrained(self._place, dtype=self._dtype, **more)

    def _note(self, error: Exception) -> None:
        """Note why the weights are not streamed; a plain sentence is expected, anything else is worth a warning."""
        is_expected = isinstance(error, UnusualModelError)
        why = str(error) if is_expected else f"{type(error).__name__}: {error}"
        level = logging.DEBUG if is_expected else logging.WARNING
        log.log(level, "the weights of %s are not streamed: %s", self._place, why)
        self.told = f"{BY_TRANSFORMERS}: {why.splitlines()[0]}"

    def _begin(self) -> None:
        if "gguf_file" in self._more:
            raise UnusualModelError("a GGUF file")
        if not os.path.isdir(self._place):
            raise UnusualModelError("no folder")
        if Path(self._place, "adapter_config.json").exists():
            raise UnusualModelError("it has an adapter")
        if not any(Path(self._place).glob("model*.safetensors")):
            raise UnusualModelError("no safetensors")
        config = AutoConfig.from_pretrained(self._place, local_files_only=True)
        for unusual in ("quantization_config", "auto_map", "transformers_weights"):
            if getattr(config, unusual, None) is not None:
                raise UnusualModelError(f"its configuration has {unusual}")
        if "text_config" in config.sub_configs:
            raise UnusualModelError("its configuration has several parts")
        dtype = self._dtype if self._dtype != "auto" else getattr(config, "dtype", None)
        if not isinstance(dtype, torch.dtype):
            raise UnusualModelError(f"its dtype is {dtype}")
        self._config, self._final_dtype = config, dtype
        stream = WeightStream(stored_tensors(self._place), device=self._device, dtype=dtype)
        self._stream = self._scope.enter_context(stream)

    def _around_stream(self, kind: Any, stream: WeightStream) -> Any:
        """Build the model around the streamed tensors. Raises UnusualModelError where the model holds other weights."""
        tensors = stream.wait()
        with _without_reserve():
            model, info = _class_of(kind, self._config).from_pretrained(
                None, config=self._config, state_dict=tensors, dtype=self._final_dtype,
                device_map={"": self._device}, output_loading_info=True,
            )  # fmt: skip
        for what in ("missing_keys", "mismatched_keys", "error_msgs", "conversion_errors"):
            if info.get(what):
                raise UnusualModelError(f"{what}: {', '.join(sorted(map(str, info[what]))[:3])}")
        if copied := _copied(model, tensors):
            torch.cuda.empty_cache()
            if stream.converts:  # a copied weight may have been converted twice, and has lost digits then
                raise UnusualModelError(f"{copied} is made of other weights, or keeps a dtype")
        model.config.name_or_path = model.name_or_path = self._place
        if model.can_generate():
            model.generation_config = _generation_config(self._place)
        return model


def streams_to(device: str) -> bool:
    """True for a device to which weights are streamed; on a CPU a mapped file is faster than any copy."""
    return device.startswith("cuda")


def _class_of(kind: Any, config: Any) -> Any:
    """The class that an Auto class chooses for this configuration: the Auto class itself takes no tensors."""
    return auto_factory._get_model_class(config, kind._model_mapping)


def _copied(model: Any, tensors: dict[str, torch.Tensor]) -> str:
    """The name of a weight that is a copy and no streamed tensor; empty without one."""
    streamed = {tensor.data_ptr() for tensor in tensors.values()}
    return next((name for name, each in model.state_dict().items() if each.data_ptr() not in streamed), "")


def _generation_config(place: str) -> Any:
    """The generation config of a model's folder, as `from_pretrained` finds it."""
    try:
        return GenerationConfig.from_pretrained(place, local_files_only=True)
    except OSError:
        return GenerationConfig.from_pretrained(
            place, config_file_name="config.json", _from_model_config=True, local_files_only=True
        )


@contextlib.contextmanager
def _without_reserve() -> Iterator[None]:
    """Keep Transformers from reserving device memory for weights that are there already."""
    plain = modeling_utils.caching_allocator_warmup
    modeling_utils.caching_allocator_warmup = lambda *_, **__: None
    try:
        yield
    finally:
        modeling_utils.caching_allocator_warmup = plain
