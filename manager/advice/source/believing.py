"""What a language model says of a source, held to the source: a value that the source does not contain is not believed.

The extractor's facts stand. The model fills the fields that are absent or that the extractor itself doubts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from stoker.manager.advice.source.facts import COUNT_FIELDS, FIELDS, MANDATORY, Scalar, SourceFact, WorkloadFacts, fits
from stoker.manager.advice.source.vocabulary import FRAMEWORKS, PRECISIONS, TASK_OF_CALL, TASK_OF_CLASS

DOUBTED = 0.5
"""A fact of the extractor that is less sure may be replaced."""
_SURE = 0.6
_SURE_OF_SMALL = 0.35
"""A small number stands in every source, so that it stands there proves little."""


def facts_believed(
    facts: WorkloadFacts, answer: Mapping[str, object], sources: Mapping[str, str]
) -> tuple[WorkloadFacts, list[str]]:
    """The facts with what is believed of the answer, and a line for each value that is not. `sources`: the texts that
    the model was shown, by name."""
    taken, refused = dict[str, SourceFact](), list[str]()
    for field in FIELDS:
        value = _plain(field, answer.get(field))
        if value is None:
            continue
        before: SourceFact | None = getattr(facts, field)
        if before is not None and before.known and before.sure >= DOUBTED:
            continue
        where = place_of(field, value, sources)
        if where is None:
            refused.append(f"the language model says {field} = {str(value)[:60]!r}, which the source does not contain")
            continue
        small = isinstance(value, int) and value < 10
        sure = _SURE_OF_SMALL if small else _SURE
        if before is None or not before.known or sure > before.sure:
            taken[field] = SourceFact(value, where, sure)
    absent = {field: why for field, why in facts.absent.items() if field not in taken}
    return msgspec.structs.replace(facts, **taken, absent=absent), refused


def place_of(field: str, value: Scalar, sources: Mapping[str, str]) -> str | None:
    """The first place (`file:line`) that contains a value, or another name of it; None if none does."""
    pattern = _pattern(field, value)
    for name, text in sources.items():
        for number, line in enumerate(text.splitlines(), start=1):
            if pattern.search(line):
                return f"{name}:{number}"
    return None


def _pattern(field: str, value: Scalar) -> re.Pattern[str]:
    if not isinstance(value, str):
        digits = "_?".join(str(value))
        return re.compile(rf"(?<![\w.]){digits}(?![\w.])")
    others = {
        "framework": [name for name, (framework, _) in FRAMEWORKS.items() if framework == value.lower()],
        "precision": [name for name, precision in PRECISIONS.items() if precision == value.lower() and len(name) > 2],
        "task": [
            *(name for name, task in TASK_OF_CLASS.items() if task == value.lower()),
            *(name for name, (task, _) in TASK_OF_CALL.items() if task == value.lower()),
        ],
    }.get(field, [])
    return re.compile("|".join(map(re.escape, (value, *others))), re.IGNORECASE)


def _plain(field: str, value: object) -> Scalar | None:
    """A value as the schema has it; None for one that does not fit."""
    if isinstance(value, dict):
        value = value.get("value")
    if isinstance(value, str):
        value = value.strip()
        if field in COUNT_FIELDS and value.replace("_", "").isdecimal() and len(value) < 20:
            value = int(value)
        elif field not in MANDATORY and value.lower() in ("none", "null", "n/a", "unknown", ""):
            return None
    return value if isinstance(value, str | int) and len(str(value)) > 0 and fits(field, value) else None
