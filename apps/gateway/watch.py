"""What the session says of itself, asked at most once a second; and models that stay loaded (`min`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from stoker.apps.gateway.first_tokens import ModelFacts
from stoker.apps.gateway.served import ServedModel, ServedModels
from stoker.errors import StokerError
from stoker.sessions import Session, Status, journal_trouble

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
