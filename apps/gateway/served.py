"""The models that are served, by name, each with the context that answers for it.

A model whose folder is gone, or cannot be read, costs the requests that ask for it and no others: the gateway comes up
without it, and looks again when it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from stoker.apps.common.models_file import ModelKind, ModelSettings, recipe_of
from stoker.apps.common.openai.request import Endpoint, RequestRefused
from stoker.apps.gateway.failures import TryLater
from stoker.apps.gateway.functions import embed, write, write_pieces
from stoker.apps.gateway.meters import ModelMeter
from stoker.contexts import Recipe, engine_options, longest_input
from stoker.errors import StokerError
from stoker.sessions import StokerApp


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
