"""Load a Transformers model onto a GPU: stream weights from safetensors files into device tensors.

Several threads read the files into pinned buffers, which are copied asynchronously. The device converts weights of
other dtypes (docs/decisions/092). Transformers then creates the model around the tensors. If streaming fails,
Transformers reads the weights.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from transformers import AutoConfig, GenerationConfig, modeling_utils
from transformers.models.auto import auto_factory
from transformers.utils import logging as transformers_logging

from stoker.contexts import layer_split
from stoker.contexts.adapter_files import read_safetensors_header
from stoker.units import show_bytes, show_seconds

_DTYPE_BY_NAME = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
BUFFER_BYTES = 8 << 20
"""Bytes of a pinned buffer. The first copy starts after one buffer is full, so a large buffer would delay it."""
_BUFFERS_PER_READER = 2
_MAX_READERS = 8


class StoredTensor(NamedTuple):
    name: str
    file: str
    start: int
    size_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class _TensorPiece(NamedTuple):
    stored: StoredTensor
    offset: int
    start: int
    end: int


class _TensorHeader(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def stored_tensors(folder: str | Path) -> list[StoredTensor]:
    """List the tensors in a folder's safetensors files. Raises OSError, ValueError."""
    single = Path(folder, "model.safetensors")
    if single.exists():
        return _read_tensor_entries(single)
    index = msgspec.json.decode(Path(folder, "model.safetensors.index.json").read_bytes(), type=_ShardIndex)
    names = sorted({Path(name).name for name in index.weight_map.values()})
    return [stored for name in names for stored in _read_tensor_entries(Path(folder, name))]


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]


def _read_tensor_entries(file: Path) -> list[StoredTensor]:
    entries, begin = read_safetensors_header(file)
    end, size = begin, file.stat().st_size
    found = [
        _build_stored_tensor(name, msgspec.convert(entry, _TensorHeader), file, begin)
        for name, entry in entries.items()
    ]
    found.sort(key=lambda stored: (stored.start, stored.size_bytes))
    for stored in found:
        if stored.start != end:
            raise ValueError(f"{file}: {stored.name} begins at byte {stored.start:,}, not {end:,}; the file is damaged")
        end += stored.size_bytes
    if end != size:
        raise ValueError(f"{file}: its tensors end at byte {end:,}, the file at byte {size:,}; it is damaged")
    return found


def _build_stored_tensor(name: str, entry: _TensorHeader, file: Path, begin: int) -> StoredTensor:
    dtype = _DTYPE_BY_NAME.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"{file}: {name} has the dtype {entry.dtype}, which is not streamed")
    first, end = entry.data_offsets
    size = dtype.itemsize * math.prod(entry.shape)
    if first < 0 or min(entry.shape, default=0) < 0 or end - first != size:
        raise ValueError(f"{file}: the size of {name} does not match its shape; the file is damaged")
    return StoredTensor(name, str(file), begin + first, size, dtype, entry.shape)


class WeightStream:
    """Streams weights to a device during a `with` block."""

    def __init__(
        self, stored: Sequence[StoredTensor], *, device: str, dtype: torch.dtype | None = None, readers: int = 0,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:  # fmt: skip
        """`dtype`: dtype of floating-point weights (None: as in the file). `readers`: threads with two buffers each (0:
        one per core, from 2 to 8). `buffer_bytes`: a multiple of 16.
        """
        self.size_bytes = sum(each.size_bytes for each in stored)
        self.seconds = 0.0
        self._stored_tensors = stored
        self._device = torch.device(device)
        self._dtype = dtype
        self._readers = readers or min(max(2, len(os.sched_getaffinity(0))), _MAX_READERS)
        self._buffer_bytes = buffer_bytes
        self._tensors: dict[str, torch.Tensor] = {}
        self._error: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="stoker-weights", daemon=True)

    def __enter__(self) -> WeightStream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._thread.join()
        self._tensors = {}

    def wait_for_tensors(self) -> dict[str, torch.Tensor]:
        """Wait until the weights are loaded. Only the first call returns the tensors, by name."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        tensors, self._tensors = self._tensors, {}
        return tensors

    @property
    def has_conversions(self) -> bool:
        return any(self._final_dtype_of(each) != each.dtype for each in self._stored_tensors)

    def describe_load(self) -> str:
        rate = self.size_bytes / max(self.seconds, 1e-6) / 1e9
        return f"{show_bytes(self.size_bytes)} of weights in {show_seconds(self.seconds)}, {rate:.1f} GB/s"

    def _final_dtype_of(self, stored: StoredTensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and stored.dtype.is_floating_point else stored.dtype

    # ---- the threads

    def _run(self) -> None:
        began = time.monotonic()
        files: dict[str, int] = {}
        try:
            for name in dict.fromkeys(each.file for each in self._stored_tensors):
                files[name] = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            self._tensors = {
                each.name: torch.empty(each.shape, dtype=self._final_dtype_of(each), device=self._device)
                for each in self._stored_tensors
            }
            self._read_all(files)
        except BaseException as error:
            self._error = error
            self._tensors = {}
            traceback.clear_frames(error.__traceback__)  # frees the buffers that the traceback refers to
        finally:
            for number in files.values():
                os.close(number)
            if self._device.type == "cuda":
                release_pinned_memory()
            self.seconds = time.monotonic() - began

    def _read_all(self, files: dict[str, int]) -> None:
        spans = deque(_split_into_spans(self._stored_tensors, self._buffer_bytes))
        readers = min(self._readers, len(spans))
        with ThreadPoolExecutor(readers or 1, thread_name_prefix="stoker-weights") as pool:
            for future in [pool.submit(self._read_spans, files, spans) for _ in range(readers)]:
                future.result()

    def _read_spans(self, files: dict[str, int], spans: deque[list[_TensorPiece]]) -> None:
        try:
            with StagingBuffers(self._device, self._buffer_bytes) as staging:
                while not self._stopped:
                    try:
                        span = spans.popleft()
                    except IndexError:
                        return
                    buffer = staging.next_buffer()
                    start, file = span[0].start, span[0].stored.file
                    read_exactly(files[file], memoryview(buffer.numpy())[: span[-1].end - start], start, name=file)
                    for piece in span:
                        self._copy_piece(piece, buffer[piece.start - start : piece.end - start], staging)
                    staging.switch_to_other_buffer()
        except BaseException:
            self._stopped = True
            raise

    def _copy_piece(self, piece: _TensorPiece, source: torch.Tensor, staging: StagingBuffers) -> None:
        dtype, flat = piece.stored.dtype, self._tensors[piece.stored.name].view(-1)
        first, size = piece.offset // dtype.itemsize, len(source) // dtype.itemsize
        target = flat[first : first + size]
        if flat.dtype == dtype:
            target.view(torch.uint8).copy_(source, non_blocking=True)
        else:
            there = staging.device_scratch_buffer()[: len(source)]
            there.copy_(source, non_blocking=True)
            target.copy_(there.view(dtype))


class StagingBuffers:
    """The two buffers of a thread that reads files, and the CUDA stream that copies the buffers to the device."""

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._is_cuda = device.type == "cuda"
        self._scope = contextlib.ExitStack()
        self._scratch: torch.Tensor | None = None
        self._buffers: list[torch.Tensor] = []
        self._events: list[Any] = [None] * _BUFFERS_PER_READER
        self._turn = 0

    def __enter__(self) -> StagingBuffers:
        if self._is_cuda:
            self._scope.enter_context(torch.cuda.device(self._device))
            # This stream first waits for the default stream, because the weights' memory belongs to the default stream.
            stream = torch.cuda.Stream(self._device)
            stream.wait_stream(torch.cuda.default_stream(self._device))
            self._scope.enter_context(torch.cuda.stream(stream))
            self._scope.callback(stream.synchronize)
        self._buffers = [
            torch.empty(self._buffer_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
            for _ in range(_BUFFERS_PER_READER)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        self._scope.close()
        self._buffers, self._events, self._scratch = [], [], None

    def next_buffer(self) -> torch.Tensor:
        """Wait until the current buffer's copies have finished, and return the buffer."""
        if (event := self._events[self._turn]) is not None:
            event.synchronize()
        return self._buffers[self._turn]

    def switch_to_other_buffer(self) -> None:
        """Switch to the other buffer. Call this after all copies from the current buffer are queued."""
        if self._is_cuda:
            self._events[self._turn] = event = torch.cuda.Event(blocking=True)
            event.record()
        self._turn = (self._turn + 1) % _BUFFERS_PER_READER

    def device_scratch_buffer(self) -> torch.Tensor:
        if self._scratch is None:
            self._scratch = torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self._device)
        return self._scratch


def release_pinned_memory() -> None:
    release = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()


def read_exactly(file: int, into: memoryview, start: int, *, name: str) -> None:
    """Fill `into` with a file's bytes from `start`. Raises OSError if the file is too short."""
    while into:
        count = os.preadv(file, [into], start)
        if not count:
            size = os.fstat(file).st_size  # the real size, because `start` may lie after the end of the file
            raise OSError(f"{name} ends at byte {size:,}, within its weights; it is damaged or still being written")
        into, start = into[count:], start + count


def _split_into_spans(stored: Sequence[StoredTensor], most_bytes: int) -> list[list[_TensorPiece]]:
    spans: list[list[_TensorPiece]] = []
    for each in stored:
        for offset in range(0, each.size_bytes, most_bytes):
            end = each.start + min(offset + most_bytes, each.size_bytes)
            first = spans[-1][0] if spans else None
            if first is None or first.stored.file != each.file or not 0 <= end - first.start <= most_bytes:
                spans.append([])
            spans[-1].append(_TensorPiece(each, offset, each.start + offset, end))
    return spans


log = logging.getLogger(__name__)

# Compute this table when a pilot preimports the module. Otherwise each load would compute it, which takes 0.3 s.
with contextlib.suppress(Exception):
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")


class UnusualModelError(Exception):
    """The model's weights cannot be streamed."""


class StreamedWeights:
    """The weights of a model, streamed during a `with` block. A causal model is split over several `devices`."""

    def __init__(self, place: str, *, dtype: Any, devices: tuple[str, ...], **more: Any) -> None:
        self._place = place
        self._dtype = dtype
        self._devices = devices
        self._more = more
        self._streams: list[WeightStream] = []
        self._config: Any = None
        self._device_by_part: dict[str, str] = {"": devices[0]}
        self._scope = contextlib.ExitStack()
        self.told = ""
        """How the weights were loaded; empty on a CPU, where they are memory-mapped."""

    def __enter__(self) -> StreamedWeights:
        if len(self._devices) > 1:
            config = AutoConfig.from_pretrained(self._place, **self._more)
            self._device_by_part = layer_split.assign_devices(config, self._devices)
        if is_streaming_target(self._devices[0]):
            try:
                self._start_streams()
            except Exception as error:
                self._log_streaming_failure(error)
        return self

    def __exit__(self, *_: object) -> None:
        self._scope.close()

    def build_model(self, kind: Any) -> Any:
        model = self._build_model(kind)
        if len(self._devices) > 1:
            layer_split.install_device_hooks(model, self._device_by_part, first=self._devices[0])
        return model

    def _build_model(self, kind: Any) -> Any:
        if self._streams:
            try:
                return self._build_model_from_streams(kind)
            except Exception as error:
                self._log_streaming_failure(error)
        more = dict(self._more)
        if self._devices != ("cpu",):
            more["device_map"] = self._device_by_part
        return kind.from_pretrained(self._place, dtype=self._dtype, **more)

    def _log_streaming_failure(self, error: Exception) -> None:
        is_expected = isinstance(error, UnusualModelError)
        why = str(error) if is_expected else f"{type(error).__name__}: {error}"
        level = logging.DEBUG if is_expected else logging.WARNING
        log.log(level, "the weights of %s are not streamed: %s", self._place, why)
        self.told = f"weights by Transformers: {why.splitlines()[0]}"

    def _start_streams(self) -> None:
        place = Path(self._place)
        if "gguf_file" in self._more:
            raise UnusualModelError("a GGUF file")
        if not place.is_dir():
            raise UnusualModelError("no folder")
        if (place / "adapter_config.json").exists():
            raise UnusualModelError("it has an adapter")
        if not any(place.glob("model*.safetensors")):
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
        places = [
            (each, layer_split.device_of_module(self._device_by_part, each.name))
            for each in stored_tensors(self._place)
        ]
        self._streams = [
            self._scope.enter_context(
                WeightStream([each for each, there in places if there == device], device=device, dtype=dtype)
            )
            for device in self._devices
        ]

    def _build_model_from_streams(self, kind: Any) -> Any:
        tensors = {name: tensor for stream in self._streams for name, tensor in stream.wait_for_tensors().items()}
        with _skip_allocator_warmup():
            # The Auto class accepts no tensors, but the class of the model does.
            model, info = auto_factory._get_model_class(self._config, kind._model_mapping).from_pretrained(
                None, config=self._config, state_dict=tensors, dtype=self._final_dtype,
                device_map=self._device_by_part, output_loading_info=True,
            )  # fmt: skip
        for what in ("missing_keys", "mismatched_keys", "error_msgs", "conversion_errors"):
            if info.get(what):
                raise UnusualModelError(f"{what}: {', '.join(sorted(map(str, info[what]))[:3])}")
        streamed = {tensor.data_ptr() for tensor in tensors.values()}
        if copied := next((name for name, each in model.state_dict().items() if each.data_ptr() not in streamed), ""):
            torch.cuda.empty_cache()
            if any(stream.has_conversions for stream in self._streams):  # a copied weight may have lost precision
                why = "is made of other weights or keeps its own dtype, so it may have lost precision"
                raise UnusualModelError(f"the weight {copied} {why}")
        model.config.name_or_path = model.name_or_path = self._place
        if model.can_generate():
            model.generation_config = _load_generation_config(self._place)
        self.told = " and ".join(stream.describe_load() for stream in self._streams)
        return model


@contextlib.contextmanager
def _skip_allocator_warmup() -> Iterator[None]:
    plain = modeling_utils.caching_allocator_warmup
    modeling_utils.caching_allocator_warmup = lambda *_, **__: None
    try:
        yield
    finally:
        modeling_utils.caching_allocator_warmup = plain


def is_streaming_target(device: str) -> bool:
    """True if weights are streamed to the device: only to a GPU, because memory-mapping is faster on a CPU."""
    return device.startswith("cuda")


def _load_generation_config(place: str) -> Any:
    try:
        return GenerationConfig.from_pretrained(place, local_files_only=True)
    except OSError:
        return GenerationConfig.from_pretrained(
            place, config_file_name="config.json", _from_model_config=True, local_files_only=True
        )


def computation_dtype(dtype: str, *, path: str, device: str) -> Any:
    """Return the dtype of the computation. `auto`: float32 on a CPU, the model's dtype on a GPU."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if device == "cpu":
        return torch.float32
    return torch.bfloat16 if path.endswith(".gguf") else "auto"


def hide_transformers_progress_bar() -> None:
    transformers_logging.disable_progress_bar()
