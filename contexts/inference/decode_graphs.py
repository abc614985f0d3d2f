"""Run decode steps as captured graphs, one graph per shape of the batch.

A graph launches the hundreds of small kernels of a decode step at once. A *shape* has the row length and row count (a
power of two, or all rows) of each used array, and the way to choose tokens. A shape is captured after 4 eager uses.
Graphs of an array that moves to other memory are dropped. Each replay writes the inputs of the next replay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from stoker.contexts.inference.adapter import Sampling
from stoker.contexts.inference.decoder import DecodePart, LeanDecoder, ReadPart, RowArray
from stoker.contexts.inference.kernels import TokenSampler, sample_tokens
from stoker.units import show_bytes

_WARM_UPS = 2  # runs before a capture, in which CUDA libraries allocate memory and choose kernels

Replay = Callable[[], None]  # a function that enqueues captured work on the device and returns without waiting


class CudaGraphs:
    """Captures functions as CUDA graphs, which share one private memory pool. `held_bytes`: size of the pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None
        self.held_bytes = 0

    def capture(self, function: Callable[[], None]) -> Replay:
        """Warm up and capture a function on a side stream. Other threads may use CUDA meanwhile (`thread_local`)."""
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            self._warm_up(function)
            torch.cuda.empty_cache()
            before, current = torch.cuda.memory_reserved(), torch.cuda.current_stream()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    function()
            finally:  # if the capture fails at its end, PyTorch leaves the side stream selected
                torch.cuda.set_stream(current)
            self.held_bytes += max(0, torch.cuda.memory_reserved() - before)
        replay: Replay = graph.replay
        return replay

    def upload(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Enqueue a copy of host values through pinned memory, which PyTorch keeps until the copy has finished."""
        into.copy_(values.pin_memory(), non_blocking=True)

    def download(self, values: torch.Tensor) -> Callable[[], list[int]]:
        """Enqueue a copy to the host. The returned function waits for the values."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._device))

        def read() -> list[int]:
            copied.synchronize()
            return list(host.tolist())

        return read

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def clear(self) -> None:
        """Free the pool. Call this after all replays were dropped: PyTorch does not reuse an empty pool."""
        self._pool = None
        self.held_bytes = 0
        torch.cuda.empty_cache()

    def _warm_up(self, function: Callable[[], None]) -> None:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                function()
        current.wait_stream(self._stream)
        torch.cuda.synchronize()


def create_cuda_graphs(device: torch.device) -> CudaGraphs | None:
    if device.type == "cuda":
        return CudaGraphs(device)
    log.info("graphs=True has no effect on %s: only CUDA devices can capture steps, so steps run eagerly", device)
    return None


log = logging.getLogger(__name__)

USES_BEFORE_CAPTURE = 4
"""Number of steps of one shape before this shape is captured. A capture takes as long as about 20 steps."""
_MAX_GRAPHS = 64
_PROBE_TOKENS, _PROBE_STEPS = 7, 3

GREEDY, SAMPLED, NUCLEUS = "greedy", "draws", "nucleus"
_GREEDY = TokenSampler(Sampling())


class RowInput(NamedTuple):
    token: int
    position: int
    draw: TokenSampler


class StepShape:
    """The arrays of a decode step, their row counts, and the request of each row (None: unused row)."""

    def __init__(self, arrays: Sequence[RowArray], draws: str) -> None:
        self.arrays = arrays
        self.rows = [min(1 << max(0, len(array.requests) - 1).bit_length(), array.capacity) for array in arrays]
        self.draws = draws
        self.key = (tuple(zip((array.tokens for array in arrays), self.rows, strict=True)), draws)
        self.requests: list[int | None] = []
        for array, rows in zip(arrays, self.rows, strict=True):
            self.requests += [*array.requests, *[None] * (rows - len(array.requests))]

    @property
    def mean_row_tokens(self) -> int:
        rows = zip(self.arrays, self.rows, strict=True)
        return sum(array.tokens * count for array, count in rows) // max(1, len(self.requests))

    @property
    def versions(self) -> list[tuple[RowArray, int]]:
        """Each array and its version. A graph is valid only for the versions with which it was captured."""
        return [(array, array.version) for array in self.arrays]


class LaunchedStep(NamedTuple):
    shape: StepShape
    tokens: Callable[[], list[int]]


class DecodeGraphs:
    """The captured steps of one decoder, for at most `rows` requests."""

    def __init__(self, decoder: LeanDecoder, backend: CudaGraphs, *, rows: int) -> None:
        self._decoder = decoder
        self._backend = backend
        self._uses_before = USES_BEFORE_CAPTURE
        self._max_rows = 2 * rows  # the row count of each array is rounded up to a power of two
        # Inputs and outputs of captured steps, one element per row. Output: the new token, or -1 for a failed draw.
        zeros = torch.zeros((4, self._max_rows), dtype=torch.int64, device=decoder.device)
        self._tokens, self._positions, self._order, self._output_tokens = zeros.unbind()
        self._draws = torch.zeros((3, self._max_rows), dtype=torch.float64, device=decoder.device)
        """Sampling inputs of each row: temperature (0 = greedy), `top_p`, and random number."""
        self._buffer_bytes = int(zeros.nbytes + self._draws.nbytes)
        self._graphs: dict[tuple[object, ...], tuple[Replay, list[tuple[RowArray, int]]]] = {}
        self._uses: dict[tuple[object, ...], int] = {}
        self.limit_bytes = 0
        self.failed = False

    @property
    def held_bytes(self) -> int:
        return self._backend.held_bytes + self._buffer_bytes

    def capturable_step_shape(self, arrays: Sequence[RowArray], draws: Sequence[TokenSampler]) -> StepShape | None:
        """Return the shape of a step over all rows, or None if the step must run without a graph."""
        if self.failed:
            return None
        drawing = [draw for draw in draws if not draw.is_greedy]
        kind = NUCLEUS if any(draw.top_p < 1 for draw in drawing) else SAMPLED if drawing else GREEDY
        shape = StepShape([array for array in arrays if array.requests], kind)
        return shape if len(shape.requests) <= self._max_rows else None

    def launch(
        self, shape: StepShape, inputs: Callable[[int], RowInput], *, after: LaunchedStep | None = None
    ) -> LaunchedStep | None:
        """Launch a step; capture the step first if its shape was used often. Return None if the step must run without a
        graph. `after`: previous step, whose new tokens stay on the device; `after` requires a graph for the shape.
        """
        if shape.key not in self._graphs or self._graphs[shape.key][1] != shape.versions:
            if after is not None:
                return None
            uses = self._uses[shape.key] = self._uses.get(shape.key, 0) + 1
            if uses <= self._uses_before or not self._capture_decode_graph(shape, inputs):
                return None
        replay, _ = self._graphs[shape.key] = self._graphs.pop(shape.key)  # move the graph to the end (last used)
        if after is None or after.shape.key != shape.key or after.shape.requests != shape.requests:
            self._fill_inputs(shape, inputs, after=after)
        if shape.draws != GREEDY:
            numbers = [0.0 if id is None else inputs(id).draw.next_random_number() for id in shape.requests]
            self._upload(numbers, self._draws[2])
        replay()
        return LaunchedStep(shape, self._backend.download(self._output_tokens[: len(shape.requests)]))

    def drop_graphs(self) -> None:
        self._backend.wait()
        self._graphs.clear()
        self._uses.clear()
        self._backend.clear()

    def check_against_eager_steps(self) -> bool:
        """Compare the results of captured and eager steps. If they differ, return False and never use graphs again."""
        try:
            off = self._measure_difference()
        except Exception as error:
            return self._disable_graphs(f"the first capture failed ({type(error).__name__}: {error})")
        self.drop_graphs()
        if not off < (1e-3 if self._decoder.dtype == torch.float32 else 0.15):
            return self._disable_graphs(f"captured steps differ from eager steps by {off:.2g} standard deviations")
        return True

    # ---- captures

    def _capture_decode_graph(self, shape: StepShape, inputs: Callable[[int], RowInput]) -> bool:
        self._graphs = {
            key: (replay, versions)
            for key, (replay, versions) in self._graphs.items()
            if key != shape.key and all(array.version == version for array, version in versions)
        }
        if len(self._graphs) == _MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        if not self._graphs:
            self._backend.clear()
        self._fill_inputs(shape, inputs)  # the warm-up runs change these inputs, so the caller must fill them again
        try:
            replay = self._backend.capture(partial(self._run_decode_step, shape))
        except Exception as error:  # too little memory, or an uncapturable operation
            return self._disable_graphs(f"a capture failed ({type(error).__name__}: {error})")
        self._graphs[shape.key] = replay, shape.versions
        if 0 < self.limit_bytes < self.held_bytes:
            held, self._max_rows = self.held_bytes, len(shape.requests) // 2
            self.drop_graphs()
            log.warning(
                "CUDA graphs of %d rows use %s, above the limit of %s: steps of more than %d rows run without graphs",
                len(shape.requests), show_bytes(held), show_bytes(self.limit_bytes), self._max_rows,
            )  # fmt: skip
            return False
        return True

    def _disable_graphs(self, why: str) -> bool:
        self.failed = True
        log.warning("decode steps run without CUDA graphs: %s", why)
        try:
            self.drop_graphs()
        except Exception as error:  # continue without graphs; if the device has failed, the next step raises
            log.debug("graphs could not be dropped: %s", error)
        return False

    def _run_decode_step(self, shape: StepShape) -> None:
        count, at = len(shape.requests), 0
        tokens, positions = self._tokens[:count], self._positions[:count]
        parts, following = list[ReadPart | DecodePart](), list[torch.Tensor]()
        for array, rows in zip(shape.arrays, shape.rows, strict=True):
            here = positions[at : at + rows]
            parts.append(DecodePart(array, here, dtype=self._decoder.dtype))
            following.append((here + 1).clamp(max=array.tokens - 1))  # keep positions of unused rows within the array
            at += rows
        logits = self._decoder.compute_logits(self._decoder.compute_states(tokens, positions, parts), range(count))
        written = _choose_next_tokens(logits, self._draws[:, :count], shape.draws)
        self._output_tokens[:count].copy_(written)
        tokens.copy_(written.clamp(min=0))
        positions.copy_(torch.cat(following))

    # ---- inputs

    def _fill_inputs(
        self, shape: StepShape, inputs: Callable[[int], RowInput], *, after: LaunchedStep | None = None
    ) -> None:
        none = RowInput(0, 0, _GREEDY)
        rows = [none if id is None else inputs(id) for id in shape.requests]
        if after is None:
            self._upload([row.token for row in rows], self._tokens)
        else:
            before = {id: row for row, id in enumerate(after.shape.requests) if id is not None}
            self._upload([0 if id is None else before[id] for id in shape.requests], self._order)
            count = len(shape.requests)
            self._tokens[:count] = self._tokens.index_select(0, self._order[:count])
        self._upload([row.position for row in rows], self._positions)
        if shape.draws != GREEDY:
            self._upload([row.draw.temperature for row in rows], self._draws[0])
            self._upload([row.draw.top_p for row in rows], self._draws[1])

    def _upload(self, values: Sequence[float], into: torch.Tensor) -> None:
        self._backend.upload(torch.tensor(values, dtype=into.dtype), into[: len(values)])

    # ---- comparison with eager steps

    def _measure_difference(self) -> float:
        """Compute the same steps with and without a graph. Return how far the logit of the graph's token lies below the
        highest logit (both without a graph), in standard deviations.
        """
        decoder, store = self._decoder, self._decoder.new_store()
        tokens = [7 * place % decoder.vocabulary for place in range(_PROBE_TOKENS)]
        store.ensure_row(0, tokens=_PROBE_TOKENS + 2 * _PROBE_STEPS, room_tokens=float("inf"))
        array, _ = store.find_row(0)
        part = ReadPart(0, array, start=0, count=_PROBE_TOKENS)
        decoder.forward(tokens, range(_PROBE_TOKENS), [part], last=[_PROBE_TOKENS - 1])
        shape, token, missed = StepShape([array], GREEDY), tokens[0], list[torch.Tensor]()

        def inputs(_id: int) -> RowInput:
            return RowInput(token, _PROBE_TOKENS, _GREEDY)

        self._fill_inputs(shape, inputs)
        replay = self._backend.capture(partial(self._run_decode_step, shape))
        self._fill_inputs(shape, inputs)
        for place in range(_PROBE_TOKENS, _PROBE_TOKENS + _PROBE_STEPS):
            expected = decoder.forward([token], [place], [decoder.decode_part(array, [place])], last=[0])[0].float()
            replay()
            [token] = self._backend.download(self._output_tokens[:1])()
            missed.append((expected.max() - expected[token]) / expected.std())
        return float(torch.stack(missed).max())


def _choose_next_tokens(logits: torch.Tensor, draws: torch.Tensor, kind: str) -> torch.Tensor:
    likeliest = logits.float().argmax(dim=-1)
    if kind == GREEDY:
        return likeliest
    drawing = draws[0] > 0
    table = torch.stack([draws[0].masked_fill(~drawing, 1.0), draws[1], draws[2]])
    drawn = sample_tokens(logits, table, nucleus=False)
    if kind == NUCLEUS:
        drawn = torch.where(draws[1] < 1, sample_tokens(logits, table, nucleus=True), drawn)
    return torch.where(drawing, drawn, likeliest)
