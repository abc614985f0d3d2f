"""The served models by name: their contexts, their statistics, and their state in the session.

If a model's folder is unreadable, only requests for this model fail. The next request reads the folder again.

The gateway forecasts the time to first token before it admits a request. For a model that is not loaded, the forecast
uses the time of earlier loads. For a loaded model, the larger of two forecasts is used:

- The session's: waiting calls leave the queue as fast as running calls end, so a new call waits `queued * run_s /
  running`.
- The gateway's: each recent stream gives two numbers: how many streams waited at its arrival, and its time to first
  token. A line through these points (least squares) predicts the time for the current number of streams.

In doubt, both forecasts accept a request. The line is extrapolated to at most twice the longest queue seen, and the
length of the prompt has no influence.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from stoker.apps.common.models_file import ModelKind, ModelSettings, make_recipe_from_settings
from stoker.apps.common.openai_requests import ApiRequest, Endpoint, RequestRefused
from stoker.apps.gateway.failures import log
from stoker.apps.gateway.functions import embed_texts, score_pairs, stream_answer, write_answer
from stoker.apps.gateway.objectives import LatencyObjectives, RequestLengths
from stoker.contexts import Recipe, longest_input
from stoker.errors import StokerError
from stoker.sessions import Session, Status, StokerApp, journal_trouble
from stoker.units import show_seconds

_MOST_SAMPLES = 64
_LEAST_SAMPLES = 8
UNKNOWN_LOAD_S = 10.0
"""Assumed load time of a model that has never been loaded."""


class ModelFacts(msgspec.Struct, frozen=True):
    """The state of a model. `load_s`, `wake_s`: seconds of the last load or wake; `loading_s`: seconds since a load
    began; `run_s`: seconds of a call.
    """

    hot: int = 0
    loading: int = 0
    asleep: int = 0
    wake_s: float = 0.0
    queued: int = 0
    running: int = 0
    load_s: float = 0.0
    loading_s: float = 0.0
    run_s: float = 0.0
    waits_for: str = ""
    failure: str = ""

    @property
    def state(self) -> str:
        return "hot" if self.hot else "loading" if self.loading else "asleep" if self.asleep else "cold"

    @property
    def seconds_until_loaded(self) -> float:
        if self.hot:
            return 0.0
        load_s = self.wake_s if self.asleep and self.wake_s else self.load_s or UNKNOWN_LOAD_S
        return max(1.0, load_s - self.loading_s)


class FirstTokenWaits(msgspec.Struct):
    """Counts the streams that wait for their first token, and keeps the waiting times of recent streams."""

    waiting: int = 0
    _seen: deque[tuple[int, float]] = msgspec.field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))
    """Per stream: number of streams that waited at its arrival, and its time to first token."""

    def begin_wait(self) -> int:
        """Count a new stream. Return the number of streams that waited before it."""
        self.waiting += 1
        return self.waiting - 1

    def end_wait(self, before: int, ttft_s: float | None) -> None:
        """End the wait of a stream. `ttft_s`: None if forecasts must not use the time."""
        self.waiting -= 1
        if ttft_s is not None:
            self._seen.append((before, ttft_s))

    def forecast_s(self, waiting: int) -> float:
        """Return the expected time to first token after `waiting` other streams; 0 if unknown."""
        if len(self._seen) < _LEAST_SAMPLES:
            return 0.0
        queues, times = zip(*self._seen, strict=True)
        rise = statistics.linear_regression(queues, times).slope if len(set(queues)) > 1 else 0.0
        waiting = min(waiting, 2 * max(queues) + 1)
        return max(0.0, statistics.fmean(times) + max(0.0, rise) * (waiting - statistics.fmean(queues)))


class FirstTokenForecast(msgspec.Struct, frozen=True):
    """The expected time to a request's first token, the reason for it, and the time if there were no other requests."""

    first_token_s: float
    because: str
    alone_s: float

    def retry_delay_s(self, objective_s: float) -> float:
        """Return the seconds until a request would meet the objective; 0 if waiting is unnecessary or useless."""
        return 0.0 if self.alone_s > objective_s else max(0.0, self.first_token_s - objective_s)


def forecast_first_token(facts: ModelFacts, first: FirstTokenWaits) -> FirstTokenForecast:
    alone_s = first.forecast_s(0)
    if not facts.hot:
        load = f"a load took {show_seconds(facts.load_s)}" if facts.load_s else "no load has been measured"
        return FirstTokenForecast(facts.seconds_until_loaded + alone_s, f"the model is {facts.state}; {load}", alone_s)
    queued_s = facts.queued * facts.run_s / facts.running if facts.running else 0.0
    own_s = first.forecast_s(first.waiting)
    if queued_s + alone_s > own_s:
        because = f"{facts.queued} calls wait, {facts.running} run, and a call takes {show_seconds(facts.run_s)}"
        return FirstTokenForecast(queued_s + alone_s, because, alone_s)
    return FirstTokenForecast(own_s, f"{first.waiting} streams wait for their first token", alone_s)


_RATE_S = 10.0
_RECENT = 500


class ModelMeter(msgspec.Struct):
    """Statistics of a model. `ttft`, `tpot`: seconds of recent requests; `refused`: number refused as too late."""

    running: int = 0
    requests: int = 0
    failed: int = 0
    refused: int = 0
    tokens: int = 0
    first: FirstTokenWaits = msgspec.field(default_factory=FirstTokenWaits)
    ttft: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_RECENT))
    tpot: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_RECENT))
    _written: deque[tuple[float, int]] = msgspec.field(default_factory=deque)
    _met: deque[bool] = msgspec.field(default_factory=lambda: deque(maxlen=_RECENT))

    def count_request_start(self) -> None:
        self.running += 1
        self.requests += 1

    def count_written_tokens(self, tokens: int, now: float) -> None:
        self.tokens += tokens
        self._written.append((now, tokens))
        self._drop_old_tokens(now)

    def count_request_end(
        self, *, failed: bool, ttft_s: float | None = None, tpot_s: float | None = None, met: Collection[bool] = ()
    ) -> None:
        """Count the end of a request. `met`: True for each objective that was met."""
        self.running -= 1
        self.failed += failed
        if ttft_s is not None:
            self.ttft.append(ttft_s)
        if tpot_s is not None:
            self.tpot.append(tpot_s)
        if met:
            self._met.append(all(met))

    def tokens_per_second(self, now: float) -> float:
        self._drop_old_tokens(now)
        return sum(tokens for _, tokens in self._written) / _RATE_S

    @property
    def objectives_met_share(self) -> float | None:
        """Share of recent streams that met all their objectives."""
        return sum(self._met) / len(self._met) if self._met else None

    def export_counts(self) -> dict[str, Any]:
        """Return all statistics except `first`, as plain values for another process."""
        found = {name: getattr(self, name) for name in self.__struct_fields__ if name != "first"}
        return {name: value if isinstance(value, int) else list(value) for name, value in found.items()}

    def sum_worker_counts(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Set the statistics to the sums of the `export_counts` of all worker processes."""
        for name, own in self.export_counts().items():
            if isinstance(own, int):
                setattr(self, name, sum(part[name] for part in parts))
            else:
                most = 0 if name == "_written" else _RECENT // max(1, len(parts))
                recent = [each for part in parts for each in part[name][-most:]]
                own_values = getattr(self, name)
                own_values.clear()
                own_values.extend(sorted(recent) if name == "_written" else recent)

    def _drop_old_tokens(self, now: float) -> None:
        while self._written and self._written[0][0] <= now - _RATE_S:
            self._written.popleft()


def median_or_none(values: deque[float]) -> float | None:
    return statistics.median_high(values) if values else None


class ServedModel:
    """A model of the gateway. `honoured`: names of the objectives that the session's policy supports."""

    def __init__(self, name: str, settings: ModelSettings, *, honoured: frozenset[str] = frozenset()) -> None:
        self.name = name
        self.settings = settings
        self.created = int(time.time())
        self.meter = ModelMeter()
        self.objectives = LatencyObjectives(float(settings.ttft or 0), float(settings.tpot or 0))
        self.lengths = RequestLengths(settings.path)
        self.is_admitted_by_policy = settings.kind is ModelKind.CHAT and "ttft_s" in honoured
        """True if the policy, not the gateway, decides whether a request would be in time."""
        self.recipe: Recipe | None = None
        self.trouble = ""
        """Why the model has no recipe; empty if the recipe exists."""
        self._apps: dict[str, StokerApp] = {}

    def prepare_recipe(self) -> None:
        """Make the recipe and apps, unless they exist. Raises RequestRefused if the model is unusable."""
        if self.recipe is not None:
            return
        try:
            self.recipe = make_recipe_from_settings(self.settings)
        except StokerError as error:
            self.trouble = str(error).partition("\n")[0]
            raise RequestRefused(
                f"the model {self.name} cannot be used here; the gateway's log says why",
                type="server_error", code="model_unavailable", status=503, why=self.trouble,
            ) from error  # fmt: skip
        self.trouble = ""
        if self.settings.kind is ModelKind.EMBEDDING:
            self._apps = {
                "whole": embed_texts.with_options(context=self.recipe),
                "scores": score_pairs.with_options(context=self.recipe),
            }  # fmt: skip
        else:
            options: dict[str, Any] = {"context": self.recipe}
            if self.is_admitted_by_policy:
                wanted = self.objectives
                options |= {"ttft": wanted.ttft_s or None, "tpot": wanted.tpot_s or None}
            self._apps = {
                "whole": write_answer.with_options(**options),
                "pieces": stream_answer.with_options(**options),
            }

    @cached_property
    def context_length(self) -> int:
        """The context length of the model in tokens; 0 if unknown."""
        writes = self.settings.kind is ModelKind.CHAT
        return self.settings.max_model_len or longest_input(self.settings.path, writes=writes)

    async def choose_app(
        self, request: ApiRequest, objectives: Mapping[str, float], *, in_pieces: bool = False
    ) -> StokerApp:
        """Return the app that runs a request. `objectives`: seconds by option, instead of the model's own. Raises
        RequestRefused for an unusable model.
        """
        self.prepare_recipe()
        found = self._apps["pieces" if in_pieces else "scores" if request.pairs else "whole"]
        if not self.is_admitted_by_policy:
            return found
        return found.with_options(features=await self.lengths.make_features(request), **objectives)


class ServedModels(dict[str, ServedModel]):
    def __init__(self, settings: Mapping[str, ModelSettings], *, honoured: frozenset[str] = frozenset()) -> None:
        super().__init__({name: ServedModel(name, each, honoured=honoured) for name, each in settings.items()})
        self.honoured = honoured

    def get_model(self, name: str) -> ServedModel:
        """Get the model, or raise RequestRefused (404) if unknown."""
        if name not in self:
            said = f"the model {name!r:.200} does not exist; the models are {', '.join(self)}"
            raise RequestRefused(said, param="model", code="model_not_found", status=404)
        return self[name]

    def get_model_for_endpoint(self, name: str, endpoint: Endpoint) -> ServedModel:
        """Return the model that a request names. Raises RequestRefused if the model needs another endpoint."""
        model = self.get_model(name)
        embeds = model.settings.kind is ModelKind.EMBEDDING
        if embeds != (endpoint is Endpoint.EMBEDDINGS):
            where = Endpoint.EMBEDDINGS.value if embeds else f"{Endpoint.CHAT.value} or {Endpoint.COMPLETIONS.value}"
            kind = "makes embeddings" if embeds else "writes texts"
            said = f"the model {name} {kind}; send the request to {where}"
            raise RequestRefused(said, param="model", code="model_mismatch")
        return model


_FRESH_S = 1.0
_WARM_EVERY_S = 2.0
_WARM_TRIES = 3
_RECENT_S = 5.0


class SessionWatch:
    def __init__(self, session: Session, models: ServedModels) -> None:
        self.session = session
        self.models = models
        self.status: Status | None = None
        """The session's last status; None before the first status and while the manager does not answer."""
        self.trouble = ""
        self._asked_at = float("-inf")
        self._status_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._warmed: set[str] = set()
        self._failures: dict[str, list[str]] = {}
        """The errors of consecutive failed loads, by model name."""

    async def read_status(self, *, within_s: float = _FRESH_S) -> Status | None:
        """Return the status, at most `within_s` seconds old."""
        async with self._status_lock:
            if time.monotonic() - self._asked_at > within_s:
                try:
                    self.status, self.trouble = await asyncio.to_thread(self.session.status), ""
                except (StokerError, TimeoutError) as error:
                    self.status, self.trouble = None, str(error) or "the session's manager does not answer"
                self._asked_at = time.monotonic()
        return self.status

    async def read_facts(self, model: ServedModel, *, within_s: float = _FRESH_S) -> ModelFacts:
        return make_model_facts(await self.read_status(within_s=within_s), model)

    async def read_recent_facts(self, model: ServedModel) -> ModelFacts:
        """Return the state of a model, at most 5 seconds old."""
        age_s = time.monotonic() - self._asked_at
        if age_s > _RECENT_S:
            return await self.read_facts(model)
        if age_s > _FRESH_S and not self._status_lock.locked():
            self._keep_task(asyncio.create_task(self.read_status()))
        return self.last_facts(model)

    @property
    def journal_trouble(self) -> str:
        return journal_trouble(self.status) if self.status is not None else ""

    def last_facts(self, model: ServedModel) -> ModelFacts:
        return make_model_facts(self.status, model)

    async def explain_wait(self, model: ServedModel) -> str:
        """Return why a stream has not started, without names of hosts, jobs or folders."""
        facts = await self.read_facts(model)
        if self.journal_trouble:
            return "the session's journal cannot be written now"
        if facts.loading:
            about = f" of about {show_seconds(facts.load_s)}" if facts.load_s else ""
            return f"loading {model.name}: {show_seconds(facts.loading_s)}{about}"
        if not facts.hot:
            return f"loading {model.name}"
        return f"{model.name}: {facts.queued} requests wait, {facts.running} run"

    def load_model(self, model: ServedModel, *, count: int = 1) -> None:
        """Load a model, unless it is loading. Raises RequestRefused if the model is unusable."""
        model.prepare_recipe()
        if model.name not in self._warmed:
            self._warmed.add(model.name)
            self._keep_task(asyncio.create_task(self._load_model(model, count)))

    async def keep_models_loaded(self) -> None:
        while any(model.settings.min for model in self.models.values()):
            for model in self.models.values():
                facts = await self.read_facts(model)
                if facts.hot:
                    self._failures.pop(model.name, None)
                least = 0 if model.settings.base else model.settings.min  # an adapter shares the libraries of its base
                tries = len(self._failures.get(model.name, ()))
                if facts.hot + facts.loading < least and tries < _WARM_TRIES:
                    with contextlib.suppress(Exception):  # the error is logged, and the load is retried
                        self.load_model(model, count=model.settings.min)
            await asyncio.sleep(_WARM_EVERY_S)

    def _keep_task(self, task: asyncio.Task[Any]) -> None:
        """Keep a reference to a task, so that Python does not garbage-collect the task."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load_model(self, model: ServedModel, count: int) -> None:
        assert model.recipe is not None
        try:
            # If the policy admits requests, ask for one library only: the policy itself loads the remaining libraries
            # of `min`.
            await asyncio.wrap_future(self.session.warm(model.recipe, 1 if model.is_admitted_by_policy else count))
            self._failures.pop(model.name, None)
        except Exception as error:
            failures = self._failures.setdefault(model.name, [])
            failures.append(str(error).partition("\n")[0])
            if failures[-1] not in failures[-2:-1]:  # log repeated failures once
                log.warning("%s could not be loaded: %s", model.name, failures[-1])
            if len(failures) == _WARM_TRIES:
                log.warning("%s is not loaded again until a request asks for it", model.name)
            await asyncio.sleep(_WARM_EVERY_S)
        finally:
            self._warmed.discard(model.name)


def make_model_facts(status: Status | None, model: ServedModel) -> ModelFacts:
    if status is None or model.recipe is None:
        return ModelFacts(failure=model.trouble)
    context = next((each for each in status.contexts if each.key == model.recipe.key), None)
    if context is None:
        return ModelFacts()
    loading = [each.loading_s for each in status.libraries if each.state == "loading" and each.recipe == context.name]
    return ModelFacts(
        hot=context.hot, loading=context.loading, asleep=context.asleep, wake_s=context.wake_s, queued=context.queued,
        running=context.running, load_s=context.load_s, run_s=context.run_s, loading_s=max(loading, default=0.0),
        waits_for=context.waits_for, failure=context.last_failure,
    )  # fmt: skip
