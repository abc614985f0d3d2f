"""The models that a session's gateways serve, as rows of `stoker status`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stoker.protocol.gateway_notes import GatewayNote, ServedModelFigures
from stoker.protocol.status import ContextStatus, LibraryStatus, SessionFacts
from stoker.units import show_line, show_seconds


def gateway_rows(notes: Iterable[GatewayNote], status: SessionFacts, *, now: float) -> list[str]:
    """What to say of each gateway: models that are loaded, used or in trouble, how many others are cold, and where
    clients find it. `now`: seconds since 1970."""
    rows: list[str] = []
    for note in notes:
        if silent_s := note.silent_s(now):
            rows.append(
                f"the gateway at {note.address} has said nothing for {show_seconds(silent_s)}: `stoker serve` with the"
                " same files serves again, at the same address"
            )
            continue
        rows += _models(note.models, status)
        rows.append(f"served at {note.address} (pid {note.pid} on {note.host})")
    return rows


def _models(models: Sequence[ServedModelFigures], status: SessionFacts) -> Iterator[str]:
    contexts = {context.key: context for context in status.contexts}
    shown = [model for model in models if model.trouble or _in_use(model, contexts.get(model.key))]
    width = max((len(model.name) for model in shown), default=0)
    for model in shown:
        yield "   ".join([model.name.ljust(width), *_facts(model, models, contexts.get(model.key), status)])
    cold = len(models) - len(shown)
    if cold:
        yield f"{cold} other{'s' * (cold != 1)} cold" if shown else f"{cold} model{'s' * (cold != 1)}, none hot yet"


def _in_use(model: ServedModelFigures, context: ContextStatus | None) -> bool:
    return bool(model.running or (context and (context.hot or context.loading or context.last_failure)))


def _facts(
    model: ServedModelFigures, all_of_them: Sequence[ServedModelFigures], context: ContextStatus | None,
    status: SessionFacts,
) -> Iterator[str]:  # fmt: skip
    if model.trouble:
        yield f"cannot be used: {show_line(model.trouble)}"
        return
    yield f"{context.hot if context else 0} hot" + (
        f", {context.loading} loading" if context and context.loading else ""
    )
    yield f"{model.running} running"
    if model.tokens_per_s:
        yield f"{model.tokens_per_s:,.0f} tokens/s"
    if model.ttft_s is not None:
        objective = f" (objective {show_seconds(model.ttft_objective_s)})" if model.ttft_objective_s else ""
        yield f"TTFT {_short(model.ttft_s)}{objective}"
    if model.met is not None:
        yield f"{100 * model.met:.1f} % met"
    if context and not context.hot and context.last_failure:
        yield f"could not be loaded: {context.last_failure}"
    yield from _shares(model, all_of_them, status.libraries)


def _short(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else show_seconds(seconds)


def _shares(
    model: ServedModelFigures, all_of_them: Sequence[ServedModelFigures], libraries: Sequence[LibraryStatus]
) -> Iterator[str]:
    """`shares n014 with qwen-7b`: models beside it on a device."""
    names = {other.recipe: other.name for other in all_of_them if other.recipe and other.recipe != model.recipe}
    mine = {
        (library.pilot, device) for library in libraries if library.recipe == model.recipe for device in library.devices
    }
    beside: dict[str, dict[str, None]] = {}
    for library in libraries:
        if library.recipe in names and any((library.pilot, device) in mine for device in library.devices):
            beside.setdefault(library.pilot, {})[names[library.recipe]] = None
    for pilot, others in beside.items():
        yield f"shares {pilot} with {', '.join(others)}"
