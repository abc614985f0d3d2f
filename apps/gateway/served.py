"""The served models by name: their contexts, figures, and state in the session.

If the folder of a model is missing or unreadable, only requests for this model fail: the gateway starts without it and
looks again at the next request. The session's status is read at most once per second.

Admission forecasts the first token. If the model is not loaded, the forecast is the rest of the load, by the time of
earlier loads. For a loaded model it is the later of two. The session's: waiting calls leave the queue as fast as
running ones end, so a new call waits `queued * run_s / running`. The gateway's: each stream with a first token has
shown how long that took behind how many others; a line through the last of them (least squares) gives the time for the
current number. It includes prompts that an engine has accepted but not read yet.

Both forecasts err towards accepting: without measurements there is no forecast, the line extends to twice the longest
queue seen, and the length of the request's own prompt does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.apps.common.models_file import ModelKind, ModelSettings, recipe_of
from stoker.apps.common.openai_requests import Endpoint, RequestRefused
from stoker.apps.gateway.failures import TryLater
from stoker.apps.gateway.functions import embed, write, write_pieces
from stoker.contexts import Recipe, engine_options, longest_input
from stoker.errors import StokerError
from stoker.sessions import Session, Status, StokerApp, journal_trouble
from stoker.units import show_seconds

_SEEN = 64
_LEAST_SEEN = 8
UNKNOWN_LOAD_S = 10.0
"""Assumed seconds of a first load."""


class ModelFacts(msgspec.Struct, frozen=True):
    """A model in the session at one moment. `load_s`: seconds of its last load; `loading_s`: seconds since the current
    load began; `run_s`: seconds of a call."""

    hot: int = 0
    loading: int = 0
    queued: int = 0
    running: int = 0
    load_s: float = 0.0
    loading_s: float = 0.0
    run_s: float = 0.0
    waits_for: str = ""
    failure: str = ""

    @property
    def state(self) -> str:
        return "hot" if self.hot else "loading" if self.loading else "cold"

    @property
    def hot_in_s(self) -> float:
        return 0.0 if self.hot else max(1.0, (self.load_s or UNKNOWN_LOAD_S) - self.loading_s)


class FirstTokens(msgspec.Struct):
    """Number of streams of one model without a token (`waiting`), and the waits of the last ones."""

    waiting: int = 0
    _seen: deque[tuple[int, float]] = msgspec.field(default_factory=lambda: deque(maxlen=_SEEN))
    """Per stream: the number waiting when it arrived, and its time to first token."""

    def begin(self) -> int:
        """Count a new stream; return how many waited before it."""
        self.waiting += 1
        return self.waiting - 1

    def end(self, before: int, ttft_s: float | None) -> None:
        """Stop waiting. `ttft_s`: None without a token, or for one that predicts nothing."""
        self.waiting -= 1
        if ttft_s is not None:
            self._seen.append((before, ttft_s))

    def expected_s(self, waiting: int) -> float:
        """Return the expected time to first token behind `waiting` others; 0 with too few measurements."""
        if len(self._seen) < _LEAST_SEEN:
            return 0.0
        count = len(self._seen)
        mean_x, mean_y = sum(x for x, _ in self._seen) / count, sum(y for _, y in self._seen) / count
        spread = sum((x - mean_x) ** 2 for x, _ in self._seen)
        rise = sum((x - mean_x) * (y - mean_y) for x, y in self._seen) / spread if spread else 0.0
        rise = max(0.0, rise)
        most = 2 * max(x for x, _ in self._seen) + 1
        return max(0.0, mean_y + rise * (min(waiting, most) - mean_x))


class FirstTokenForecast(msgspec.Struct, frozen=True):
    """The expected time to first token of a new request, why, and the time without other requests."""

    first_token_s: float
    because: str
    alone_s: float

    def later_s(self, objective_s: float) -> float:
        """Return the seconds after which a request would be in time; 0 if it is in time now, or if it would be late
        even alone, because refusing it would not help.
        """
        return 0.0 if self.alone_s > objective_s else max(0.0, self.first_token_s - objective_s)


def forecast(facts: ModelFacts, first: FirstTokens) -> FirstTokenForecast:
    alone_s = first.expected_s(0)
    if not facts.hot:
        load = f"a load took {show_seconds(facts.load_s)}" if facts.load_s else "no load of it has been measured"
        return FirstTokenForecast(facts.hot_in_s + alone_s, f"it is {facts.state}, and {load}", alone_s)
    queued_s = facts.queued * facts.run_s / facts.running if facts.running else 0.0
    own_s = first.expected_s(first.waiting)
    if queued_s + alone_s > own_s:
        because = f"{facts.queued} calls wait, {facts.running} run, and one takes {show_seconds(facts.run_s)}"
        return FirstTokenForecast(queued_s + alone_s, because, alone_s)
    return FirstTokenForecast(own_s, f"{first.waiting} streams wait for their first token", alone_s)


_RATE_S = 10.0
_RECENT = 500


class ModelMeter(msgspec.Struct):
    """Figures of one model. `ttft` and `tpot` are of recent requests; an objective of 0 means none."""

    ttft_objective_s: float = 0.0
    tpot_objective_s: float = 0.0
    running: int = 0
    requests: int = 0
    failed: int = 0
    tokens: int = 0
    asked_at: float = 0.0
    first: FirstTokens = msgspec.field(default_factory=FirstTokens)
    ttft: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_RECENT))
    tpot: deque[float] = msgspec.field(default_factory=lambda: deque(maxlen=_RECENT))
    _written: deque[tuple[float, int]] = msgspec.field(default_factory=deque)
    _met: deque[bool] = msgspec.field(default_factory=lambda: deque(maxlen=_RECENT))

    def begin(self, now: float) -> None:
        self.running += 1
        self.requests += 1
        self.asked_at = now

    def write(self, tokens: int, now: float) -> None:
        self.tokens += tokens
        self._written.append((now, tokens))
        self._forget(now)

    def end(self, *, failed: bool, ttft_s: float | None = None, tpot_s: float | None = None) -> None:
        """Count an ended request. `ttft_s`, `tpot_s`: of a streamed one."""
        self.running -= 1
        self.failed += failed
        if ttft_s is not None:
            self.ttft.append(ttft_s)
            if tpot_s is not None:
                self.tpot.append(tpot_s)
            if self.ttft_objective_s or self.tpot_objective_s:
                late = 0 < self.ttft_objective_s < ttft_s
                slow = tpot_s is not None and 0 < self.tpot_objective_s < tpot_s
                self._met.append(not (late or slow or failed))

    def rate(self, now: float) -> float:
        """Return tokens per second over the last ten seconds."""
        self._forget(now)
        return sum(tokens for _, tokens in self._written) / _RATE_S

    @property
    def met(self) -> float | None:
        """Share of recent streams that met their objectives; None without any."""
        return sum(self._met) / len(self._met) if self._met else None

    def _forget(self, now: float) -> None:
        while self._written and self._written[0][0] <= now - _RATE_S:
            self._written.popleft()


def median(values: deque[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


class ServedModel:
    """One model: settings, figures, and, once its folder is read, its context's recipe."""

    def __init__(self, name: str, settings: ModelSettings) -> None:
        self.name = name
        self.settings = settings
        self.created = int(time.time())
        self.meter = ModelMeter(ttft_objective_s=settings.ttft, tpot_objective_s=settings.tpot)
        self.recipe: Recipe | None = None
        self.trouble = ""
        """Why there is no recipe."""
        self.engine_options = engine_options(settings.engine)
        """Names of the options that its engine has beyond the common ones."""
        self._longest: int | None = None
        self._apps: dict[bool, StokerApp] = {}

    def prepare(self) -> None:
        """Read the model's folder once. Raises TryLater if it is unusable."""
        if self.recipe is not None:
            return
        try:
            self.recipe = recipe_of(self.settings)
        except StokerError as error:
            self.trouble = str(error).partition("\n")[0]
            raise TryLater(
                f"the model {self.name} cannot be used here; the gateway's log says why",
                type="server_error", code="model_unavailable", status=503, why=self.trouble,
            ) from error  # fmt: skip
        self.trouble = ""
        if self.settings.kind is ModelKind.EMBEDDING:
            self._apps = {False: embed.with_options(context=self.recipe)}
        else:
            whole, pieces = write.with_options(context=self.recipe), write_pieces.with_options(context=self.recipe)
            self._apps = {False: whole, True: pieces}

    @property
    def longest(self) -> int:
        """The model's context length in tokens; 0 if its files do not state it."""
        if self._longest is None:
            self._longest = longest_input(self.settings.path, writes=self.settings.kind is ModelKind.CHAT)
        return self._longest

    def app(self, *, in_pieces: bool = False) -> StokerApp:
        """Return the function that answers. Raises TryLater if the model is unusable."""
        self.prepare()
        return self._apps[in_pieces]


class ServedModels(dict[str, ServedModel]):
    def __init__(self, settings: Mapping[str, ModelSettings]) -> None:
        super().__init__({name: ServedModel(name, each) for name, each in settings.items()})

    def named(self, name: str) -> ServedModel:
        """Return a model. Raises RequestRefused (404)."""
        if name not in self:
            known = ", ".join(self)
            raise RequestRefused(
                f"the model {name!r:.200} does not exist; there are {known}", param="model", code="model_not_found",
                status=404,
            )  # fmt: skip
        return self[name]

    def asked(self, name: str, endpoint: Endpoint) -> ServedModel:
        """Return the model of a request. Raises RequestRefused if it has another endpoint."""
        model = self.named(name)
        embeds = model.settings.kind is ModelKind.EMBEDDING
        if embeds != (endpoint is Endpoint.EMBEDDINGS):
            where = Endpoint.EMBEDDINGS.value if embeds else f"{Endpoint.CHAT.value} or {Endpoint.COMPLETIONS.value}"
            kind = "makes embeddings" if embeds else "writes texts"
            raise RequestRefused(f"the model {name} {kind}; ask it at {where}", param="model", code="model_mismatch")
        return model


log = logging.getLogger("stoker.gateway")

_FRESH_S = 1.0
_WARM_EVERY_S = 2.0
_WARM_TRIES = 3
_RECENT_S = 5.0
_OVER_EVERY_S = 1.0


class SessionWatch:
    def __init__(self, session: Session, models: ServedModels) -> None:
        self.session = session
        self.models = models
        self.status: Status | None = None
        """The last status; None before the first, and while the manager does not answer."""
        self.trouble = ""
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._warmed: set[str] = set()
        self._failures: dict[str, str] = {}
        """Errors of the last loads, by name."""
        self._failed_loads: dict[str, int] = {}
        """Consecutive failed loads, by name."""

    async def now(self, *, within_s: float = _FRESH_S) -> Status | None:
        """Return the status, at most `within_s` old."""
        async with self._asking:
            if time.monotonic() - self._asked_at > within_s:
                try:
                    self.status, self.trouble = await asyncio.to_thread(self.session.status), ""
                except (StokerError, TimeoutError) as error:
                    self.status, self.trouble = None, str(error) or "the session's manager does not answer"
                self._asked_at = time.monotonic()
        return self.status

    async def facts(self, model: ServedModel, *, within_s: float = _FRESH_S) -> ModelFacts:
        return facts_of(await self.now(within_s=within_s), model)

    async def recent(self, model: ServedModel) -> ModelFacts:
        """Return the facts of a model, at most a few seconds old, so that requests rarely wait for a status."""
        age_s = time.monotonic() - self._asked_at
        if age_s > _RECENT_S:
            return await self.facts(model)
        if age_s > _FRESH_S and not self._asking.locked():
            self._keep(asyncio.create_task(self.now()))
        return self.last(model)

    @property
    def journal_trouble(self) -> str:
        """Why the session's journal could not be written at the last status; empty if it could."""
        return journal_trouble(self.status) if self.status is not None else ""

    def last(self, model: ServedModel) -> ModelFacts:
        return facts_of(self.status, model)

    def wake(self, model: ServedModel, *, count: int = 1) -> None:
        """Load a model; no-op while that is under way. Raises TryLater if it is unusable."""
        model.prepare()
        if model.name not in self._warmed:
            self._warmed.add(model.name)
            self._keep(asyncio.create_task(self._warm(model, count)))

    async def until_over(self) -> None:
        """Wait for the end of the session: `stoker down`, or a manager that is gone for good."""
        while self.session.over is None:
            await asyncio.sleep(_OVER_EVERY_S)

    async def keep_warm(self) -> None:
        while any(model.settings.min for model in self.models.values()):
            for model in self.models.values():
                facts = await self.facts(model)
                if facts.hot:
                    self._failed_loads.pop(model.name, None)
                if facts.hot + facts.loading < model.settings.min and self._may_warm(model):
                    with contextlib.suppress(Exception):  # it has said so, and is asked again
                        self.wake(model, count=model.settings.min)
            await asyncio.sleep(_WARM_EVERY_S)

    def _may_warm(self, model: ServedModel) -> bool:
        """False for a model whose loads failed repeatedly: only a request loads it then."""
        return self._failed_loads.get(model.name, 0) < _WARM_TRIES

    def _keep(self, task: asyncio.Task[Any]) -> None:
        """Keep a reference: a task without one may be collected before it ends."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _warm(self, model: ServedModel, count: int) -> None:
        assert model.recipe is not None
        try:
            await asyncio.wrap_future(self.session.warm(model.recipe, count))
            self._failures.pop(model.name, None)
            self._failed_loads.pop(model.name, None)
        except Exception as error:
            failed = self._failed_loads[model.name] = self._failed_loads.get(model.name, 0) + 1
            said = str(error).partition("\n")[0]
            if self._failures.get(model.name) != said:  # it is tried again and again, and told once
                self._failures[model.name] = said
                log.warning("%s could not be loaded: %s", model.name, said)
            if failed == _WARM_TRIES:
                log.warning("%s is not loaded again until a request asks for it", model.name)
            await asyncio.sleep(_WARM_EVERY_S)
        finally:
            self._warmed.discard(model.name)


def facts_of(status: Status | None, model: ServedModel) -> ModelFacts:
    if status is None or model.recipe is None:
        return ModelFacts(failure=model.trouble)
    context = next((each for each in status.contexts if each.key == model.recipe.key), None)
    if context is None:
        return ModelFacts()
    loading = [each.loading_s for each in status.libraries if each.state == "loading" and each.recipe == context.name]
    return ModelFacts(
        hot=context.hot,
        loading=context.loading,
        queued=context.queued,
        running=context.running,
        load_s=context.load_s,
        run_s=context.run_s,
        loading_s=max(loading, default=0.0),
        waits_for=context.waits_for,
        failure=context.last_failure,
    )
