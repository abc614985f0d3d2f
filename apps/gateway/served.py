"""The models that are served, by name, each with its context; and the session's status, asked at most once a second.

A model whose folder is gone, or cannot be read, fails the requests that name it and no others: the gateway starts
without it, and looks again when a request names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from stoker.apps.common.models_file import ModelKind, ModelSettings, recipe_of
from stoker.apps.common.openai.request import Endpoint, RequestRefused
from stoker.apps.gateway.failures import TryLater
from stoker.apps.gateway.functions import embed, write, write_pieces
from stoker.apps.gateway.meters import ModelFacts, ModelMeter
from stoker.contexts import Recipe, engine_options, longest_input
from stoker.errors import StokerError
from stoker.sessions import Session, Status, StokerApp, journal_trouble

# ---- served


class ServedModel:
    """One model: its settings, its figures, and, once its folder has been read, its context's recipe."""

    def __init__(self, name: str, settings: ModelSettings) -> None:
        self.name = name
        self.settings = settings
        self.created = int(time.time())
        self.meter = ModelMeter(ttft_objective_s=settings.ttft, tpot_objective_s=settings.tpot)
        self.recipe: Recipe | None = None
        self.trouble = ""
        """Why there is no recipe."""
        self.engine_options = engine_options(settings.engine)
        """The names of what requests may ask of its engine beyond what every engine can."""
        self._longest: int | None = None
        self._apps: dict[bool, StokerApp] = {}

    def prepare(self) -> None:
        """Read the model's folder, if that has not been done. Raises TryLater where it cannot be used."""
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
        """The most tokens of a prompt and what follows it, as the model's files say; 0 where they do not."""
        if self._longest is None:
            self._longest = longest_input(self.settings.path, writes=self.settings.kind is ModelKind.CHAT)
        return self._longest

    def app(self, *, in_pieces: bool = False) -> StokerApp:
        """The function that answers for it. Raises TryLater where the model cannot be used."""
        self.prepare()
        return self._apps[in_pieces]


class ServedModels(dict[str, ServedModel]):
    """The models by name, in the order of the file."""

    def __init__(self, settings: Mapping[str, ModelSettings]) -> None:
        super().__init__({name: ServedModel(name, each) for name, each in settings.items()})

    def named(self, name: str) -> ServedModel:
        """The model of this name. Raises RequestRefused (404)."""
        if name not in self:
            known = ", ".join(self)
            raise RequestRefused(
                f"the model {name!r:.200} does not exist; there are {known}", param="model", code="model_not_found",
                status=404,
            )  # fmt: skip
        return self[name]

    def asked(self, name: str, endpoint: Endpoint) -> ServedModel:
        """The model that a request names. Raises RequestRefused for one that this endpoint does not ask."""
        model = self.named(name)
        embeds = model.settings.kind is ModelKind.EMBEDDING
        if embeds != (endpoint is Endpoint.EMBEDDINGS):
            where = Endpoint.EMBEDDINGS.value if embeds else f"{Endpoint.CHAT.value} or {Endpoint.COMPLETIONS.value}"
            kind = "makes embeddings" if embeds else "writes texts"
            raise RequestRefused(f"the model {name} {kind}; ask it at {where}", param="model", code="model_mismatch")
        return model


# ---- watch


log = logging.getLogger("stoker.gateway")

_FRESH_S = 1.0
_WARM_EVERY_S = 2.0
_WARM_TRIES = 3
_RECENT_S = 5.0
_OVER_EVERY_S = 1.0


class SessionWatch:
    """Asks the session for its status, for all who want it."""

    def __init__(self, session: Session, models: ServedModels) -> None:
        self.session = session
        self.models = models
        self.status: Status | None = None
        """The last one; None before the first, and while the manager does not answer."""
        self.trouble = ""
        """Why there is no status."""
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._warmed: set[str] = set()
        self._failures: dict[str, str] = {}
        """Why models could not be loaded the last time, by name."""
        self._failed_loads: dict[str, int] = {}
        """How many loads have failed in a row, by the model's name."""

    async def now(self, *, within_s: float = _FRESH_S) -> Status | None:
        """The status, not older than `within_s`."""
        async with self._asking:
            if time.monotonic() - self._asked_at > within_s:
                try:
                    self.status, self.trouble = await asyncio.to_thread(self.session.status), ""
                except (StokerError, TimeoutError) as error:
                    self.status, self.trouble = None, str(error) or "the session's manager does not answer"
                self._asked_at = time.monotonic()
        return self.status

    async def facts(self, model: ServedModel, *, within_s: float = _FRESH_S) -> ModelFacts:
        """What the session says of a model."""
        return facts_of(await self.now(within_s=within_s), model)

    async def recent(self, model: ServedModel) -> ModelFacts:
        """What the session says of a model, some seconds old at most: a request does not wait for each answer, and not
        for a manager that has not answered a moment ago."""
        age_s = time.monotonic() - self._asked_at
        if age_s > _RECENT_S:
            return await self.facts(model)
        if age_s > _FRESH_S and not self._asking.locked():
            self._keep(asyncio.create_task(self.now()))
        return self.last(model)

    @property
    def journal_trouble(self) -> str:
        """Why the session took no calls when it was asked last: its journal cannot be written. Empty while it can."""
        return journal_trouble(self.status) if self.status is not None else ""

    def last(self, model: ServedModel) -> ModelFacts:
        """What the session last said of a model."""
        return facts_of(self.status, model)

    def wake(self, model: ServedModel, *, count: int = 1) -> None:
        """Have a model loaded; no-op while that is under way. Raises TryLater if it cannot be used."""
        model.prepare()
        if model.name not in self._warmed:
            self._warmed.add(model.name)
            self._keep(asyncio.create_task(self._warm(model, count)))

    async def until_over(self) -> None:
        """Wait until the session is over: `stoker down`, or a manager that is gone for good."""
        while self.session.over is None:
            await asyncio.sleep(_OVER_EVERY_S)

    async def keep_warm(self) -> None:
        """Load models that are to stay loaded and are not, until this is cancelled."""
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
        """False for a model whose loads have failed again and again: a request has it loaded, and nothing else does."""
        return self._failed_loads.get(model.name, 0) < _WARM_TRIES

    def _keep(self, task: asyncio.Task[Any]) -> None:
        """A task that nothing refers to may be collected before it ends."""
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
    """What a status says of a model."""
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
