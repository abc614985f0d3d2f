"""Labelled claims: FEVER's jsonl format, and plain CSV, JSONL or Parquet with columns claim, label, optional evidence.

A row's `id` identifies it in results; a file without ids gets the numbers of its lines. Evidence may be text, or a list
of texts that are joined. (FEVER's own `evidence` lists page names and sentence numbers, not text: it is passed over.)
"""

from __future__ import annotations

import enum
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stoker.apps.common.data_rows import is_empty
from stoker.datafile import Row, read_rows, text_field
from stoker.errors import ConfigError

SAMPLE = Path(__file__).parent / "data" / "fever_sample.jsonl"


class Label(enum.Enum):
    """What a claim is, in FEVER's words."""

    SUPPORTS = "SUPPORTS"
    """The evidence (or what is known) supports the claim."""
    REFUTES = "REFUTES"
    """It contradicts the claim."""
    NOT_ENOUGH_INFO = "NOT ENOUGH INFO"
    """It does not tell."""


LABELS = tuple(Label)
_SPELLINGS = {
    "supports": Label.SUPPORTS, "supported": Label.SUPPORTS, "true": Label.SUPPORTS,
    "refutes": Label.REFUTES, "refuted": Label.REFUTES, "false": Label.REFUTES,
    "not enough info": Label.NOT_ENOUGH_INFO, "nei": Label.NOT_ENOUGH_INFO, "unknown": Label.NOT_ENOUGH_INFO,
}  # fmt: skip


class Claim(msgspec.Struct, frozen=True):
    """One claim. `place` is where in the file it stands; `evidence` is empty when there is none."""

    id: str
    claim: str
    label: Label
    evidence: str
    place: str


def read_claims(path: Path) -> list[Claim]:
    """Every claim of the file. Raises ConfigError naming file, line and field for the first row that is not one."""
    claims: list[Claim] = []
    seen: dict[str, str] = {}
    for row in read_rows(path):
        claim = _claim(row, file=path)
        if claim.id in seen:
            raise ConfigError(
                f"{path}: {row.place}: id {claim.id} was already used in {seen[claim.id]}",
                file=str(path), line=row.number, key="id",
            )  # fmt: skip
        seen[claim.id] = row.place
        claims.append(claim)
    if not claims:
        raise ConfigError(f"{path}: holds no claims", file=str(path))
    return claims


def sample_claims(claims: Sequence[Claim], *, limit: int | None, seed: int) -> list[Claim]:
    """`limit` claims (None: all) in the file's order, drawn by chance with each label's share kept.

    Shares are rounded by largest remainder, so the same file, limit and seed give the same claims everywhere.
    """
    if limit is None or limit >= len(claims):
        return list(claims)
    places = {label: [n for n, claim in enumerate(claims) if claim.label is label] for label in LABELS}
    exact = {label: limit * len(places[label]) / len(claims) for label in LABELS}
    take = {label: int(exact[label]) for label in LABELS}
    for label in sorted(LABELS, key=lambda one: take[one] - exact[one])[: limit - sum(take.values())]:
        take[label] += 1
    chance = random.Random(seed)
    chosen = sorted(place for label in LABELS for place in chance.sample(places[label], take[label]))
    return [claims[place] for place in chosen]


def digest_claims(claims: Sequence[Claim]) -> str:
    """16 hex digits that stand for these claims with their labels and evidence, wherever they were read from."""
    digest = hashlib.sha256()
    for claim in claims:
        digest.update(msgspec.json.encode((claim.id, claim.claim, claim.label, claim.evidence)))
    return digest.hexdigest()[:16]


def _claim(row: Row, *, file: Path) -> Claim:
    text = text_field(row, "claim", file=file).strip()
    spelled = text_field(row, "label", file=file)
    label = _SPELLINGS.get(" ".join(spelled.lower().replace("_", " ").split()))
    if label is None:
        raise ConfigError(
            f"{file}: {row.place}: label is {spelled!r:.40}; it must be SUPPORTS, REFUTES or NOT ENOUGH INFO",
            file=str(file), line=row.number, key="label",
        )  # fmt: skip
    name = row.fields.get("id")
    if is_empty(name):
        name = row.number
    if not isinstance(name, str | int):
        raise ConfigError(
            f"{file}: {row.place}: id must be a number or text, and is {name!r:.40}",
            file=str(file), line=row.number, key="id",
        )  # fmt: skip
    return Claim(id=str(name), claim=text, label=label, evidence=_evidence(row, file=file), place=row.place)


def _evidence(row: Row, *, file: Path) -> str:
    """The evidence of a row; empty without one. Raises ConfigError for what is neither text nor a list."""
    value = row.fields.get("evidence")
    if is_empty(value):
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list):
        return " ".join(value).strip() if all(isinstance(part, str) for part in value) else ""
    raise ConfigError(
        f"{file}: {row.place}: evidence must be text or a list of texts, and is {value!r:.40}",
        file=str(file), line=row.number, key="evidence",
    )  # fmt: skip
