"""The schema of what a function and its context are (SchedMate §3.1, Figure 6).

Fields with a star in Figure 6 are mandatory: `model`, `task` and `data` are there or say "unknown". Each fact keeps its
place in the source and how sure it is, so that a person can check it, and the language model of `agent.py` can be
held to it.
"""

from __future__ import annotations

import msgspec

from stoker.manager.advice.secrets import masked

Scalar = str | int | float
"""What a fact's value is. A truth value is not a fact here."""

UNKNOWN = "unknown"
ARGUMENT = "argument"
"""The place of a fact that stands in no file."""

MANDATORY = ("model", "task", "data")
FIELDS = (
    *MANDATORY,
    "batch_size",
    "epochs",
    "items",
    "steps",
    "sequence_length",
    "precision",
    "framework",
    "devices",
)
"""The fields of `WorkloadFacts` that hold facts, in the order in which people read them."""

TEXT_FIELDS = frozenset({"model", "task", "data", "precision", "framework"})
"""Fields whose value is a text. `devices` may be either: `"cuda"`, or how many."""
COUNT_FIELDS = frozenset({"batch_size", "epochs", "items", "steps", "sequence_length"})
"""Fields whose value is a whole number from 1 on."""


class SourceFact(msgspec.Struct, frozen=True):
    """A value, where it was found (`file:line`, or `argument`), and how sure it is, from 0 to 1."""

    value: Scalar
    where: str = ""
    sure: float = 0.0

    @property
    def known(self) -> bool:
        """False for a mandatory field of which nothing was found."""
        return self.value != UNKNOWN or self.sure > 0


NOT_FOUND = SourceFact(UNKNOWN)


class WorkloadFacts(msgspec.Struct, frozen=True):
    """What the source of a function or a loader says of its work.

    `further` holds other named numbers and words: the arguments of the entry function, sizes of layers, what a config
    says. `absent` says for each field that was not found why. `notes` lists what could not be read, and why. `text` is
    the normalised source of all functions that were followed, `same` a digest of it and of the arguments: two functions
    that differ in comments or names of variables have one `same`.
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
        """The facts of the schema that were found, by field."""
        found = {field: getattr(self, field) for field in FIELDS}
        return {field: fact for field, fact in found.items() if fact is not None and fact.known}


def without_secrets(facts: WorkloadFacts) -> WorkloadFacts:
    """The facts without what looks like a password or a key, in the text or behind a name: they are kept on disk."""
    further = {
        name: fact for name, fact in facts.further.items() if masked(f"{name}={fact.value}") == f"{name}={fact.value}"
    }
    return msgspec.structs.replace(facts, further=further, text=masked(facts.text))


def fits(field: str, value: object) -> bool:
    """True if a value can be that of a field: a count is a whole number from 1 on, a name a short text of one line."""
    if isinstance(value, bool):
        return False
    if field in COUNT_FIELDS:
        return isinstance(value, int) and 1 <= value < 10**12
    if isinstance(value, str):
        return bool(value.strip()) and len(value) <= 300 and value.isprintable() and value != UNKNOWN
    return field == "devices" and isinstance(value, int) and 1 <= value <= 100_000
