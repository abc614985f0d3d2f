"""The facts of a function and its context (SchedMate §3.1, Figure 6).

Fields with a star in Figure 6 are mandatory: `model`, `task` and `data` have a value or say "unknown". Each fact keeps
its place in the source and its certainty, so that a person, or the check of the language model, can verify it.
"""

from __future__ import annotations

import msgspec

from stoker.manager.advice.secrets import masked

Scalar = str | int | float

UNKNOWN = "unknown"
ARGUMENT = "argument"
"""The place of a fact that comes from an argument and not from a file."""

MANDATORY = ("model", "task", "data")
COUNT_FIELDS = ("batch_size", "epochs", "items", "steps", "sequence_length")
"""Fields whose value is a positive whole number."""
FIELDS = (*MANDATORY, *COUNT_FIELDS, "precision", "framework", "devices")
"""The fields of `WorkloadFacts` that hold facts. `devices` may be a text (`"cuda"`) or a number."""


class SourceFact(msgspec.Struct, frozen=True):
    """A value, its place (`file:line`, or `argument`), and its certainty from 0 to 1."""

    value: Scalar
    where: str = ""
    sure: float = 0.0

    @property
    def known(self) -> bool:
        """False for a mandatory field without a value."""
        return self.value != UNKNOWN or self.sure > 0


NOT_FOUND = SourceFact(UNKNOWN)


class WorkloadFacts(msgspec.Struct, frozen=True):
    """The facts of a function or a loader.

    `further`: other named numbers and words (arguments, sizes of layers, config values). `absent`: the reason for each
    field without a value. `notes`: the files that could not be read, and why. `text`: the normalised source of all
    functions that were followed; `same`: a digest of it and of the arguments, equal for two functions that differ only
    in comments or names of variables.
    """

    model: SourceFact = NOT_FOUND
    task: SourceFact = NOT_FOUND
    data: SourceFact = NOT_FOUND
    batch_size: SourceFact | None = None
    epochs: SourceFact | None = None
    items: SourceFact | None = None
    steps: SourceFact | None = None
    sequence_length: SourceFact | None = None
    precision: SourceFact | None = None
    framework: SourceFact | None = None
    devices: SourceFact | None = None
    further: dict[str, SourceFact] = {}
    absent: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    text: str = ""
    same: str = ""

    def known_facts(self) -> dict[str, SourceFact]:
        """Return the facts with a value, by field."""
        found = {field: getattr(self, field) for field in FIELDS}
        return {field: fact for field, fact in found.items() if fact is not None and fact.known}


def without_secrets(facts: WorkloadFacts) -> WorkloadFacts:
    """Return the facts without texts that look like a password or a key: they are kept on disk."""
    shown = {name: f"{name}={fact.value}" for name, fact in facts.further.items()}
    further = {name: fact for name, fact in facts.further.items() if masked(shown[name]) == shown[name]}
    return msgspec.structs.replace(facts, further=further, text=masked(facts.text))


def fits(field: str, value: object) -> bool:
    """True if a field can have this value: a positive count, or a short text of one line."""
    if isinstance(value, bool):
        return False
    if field in COUNT_FIELDS:
        return isinstance(value, int) and 1 <= value < 10**12
    if isinstance(value, str):
        return bool(value.strip()) and len(value) <= 300 and value.isprintable() and value != UNKNOWN
    return field == "devices" and isinstance(value, int) and 1 <= value <= 100_000
