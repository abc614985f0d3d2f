"""The options of a run, its labelled claims and prompt templates, and the identity of a run.

A claim file is FEVER's JSONL, or CSV, JSONL or Parquet. Its columns are claim, label and optionally evidence (a text or
a list of texts). A row's `id` (or its line number) identifies the claim in results. FEVER's own `evidence` has no text
and is ignored.

A template has a text with `{claim}` (and `{evidence}`) that ends where the model's answer begins, and an answer word
for each label. Words of one token are cheapest, because one pass scores all three words. The text before `{claim}` is
computed once for all claims, so write the instructions first.

    [[prompts]]                                 a TOML file, or a JSONL file with one template per line
    name = "plain"
    text = '''Is the claim true, false or unknown?
    Claim: {claim}
    Answer:'''
    answers = { SUPPORTS = " True", REFUTES = " False", "NOT ENOUGH INFO" = " Unknown" }
"""

from __future__ import annotations

import enum
import hashlib
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.common.data_rows import Text, is_empty, make_row_error, read_toml, refuse_duplicates
from stoker.contexts import Awareness
from stoker.datafile import Row, read_rows, text_field
from stoker.errors import ConfigError

SAMPLE = Path(__file__).parent / "data" / "fever_sample.jsonl"


class ClaimLabel(enum.Enum):
    """The label of a claim, spelled as in the FEVER data set."""

    SUPPORTS = "SUPPORTS"
    REFUTES = "REFUTES"
    NOT_ENOUGH_INFO = "NOT ENOUGH INFO"


LABELS = tuple(ClaimLabel)
_LABEL_SPELLINGS = {
    "supports": ClaimLabel.SUPPORTS, "supported": ClaimLabel.SUPPORTS, "true": ClaimLabel.SUPPORTS,
    "refutes": ClaimLabel.REFUTES, "refuted": ClaimLabel.REFUTES, "false": ClaimLabel.REFUTES,
    "not enough info": ClaimLabel.NOT_ENOUGH_INFO, "nei": ClaimLabel.NOT_ENOUGH_INFO,
    "unknown": ClaimLabel.NOT_ENOUGH_INFO,
}  # fmt: skip


class Claim(msgspec.Struct, frozen=True):
    """One claim. `place`: position of the claim in the file, such as `line 7`; `evidence` may be empty."""

    id: str
    claim: str
    label: ClaimLabel
    evidence: str
    place: str


def read_claims(path: Path) -> list[Claim]:
    """Return the claims of a file. Raises ConfigError for the first invalid row."""
    claims: dict[str, Claim] = {}
    for row in read_rows(path):
        claim = _read_claim(row, file=path)
        if first := claims.get(claim.id):
            raise make_row_error(f"id {claim.id} was already used in {first.place}", row, path=path, key="id")
        claims[claim.id] = claim
    if not claims:
        raise ConfigError.in_file(path, "has no claims")
    return list(claims.values())


def draw_claims(claims: Sequence[Claim], *, limit: int | None, seed: int) -> list[Claim]:
    """Draw `limit` random claims (None: all), in file order. The sample keeps the share of each label (largest
    remainder method).
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
    digest = hashlib.sha256()
    for claim in claims:
        digest.update(msgspec.json.encode((claim.id, claim.claim, claim.label, claim.evidence)))
    return digest.hexdigest()[:16]


def _read_claim(row: Row, *, file: Path) -> Claim:
    text = text_field(row, "claim", file=file).strip()
    spelled = text_field(row, "label", file=file)
    label = _LABEL_SPELLINGS.get(" ".join(spelled.lower().replace("_", " ").split()))
    if label is None:
        problem = f"label is {spelled!r:.40}; it must be SUPPORTS, REFUTES or NOT ENOUGH INFO"
        raise make_row_error(problem, row, path=file, key="label")
    name = row.fields.get("id")
    if is_empty(name):
        name = row.number
    if not isinstance(name, str | int):
        raise make_row_error(f"id must be a number or text, and is {name!r:.40}", row, path=file, key="id")
    return Claim(id=str(name), claim=text, label=label, evidence=_read_evidence(row, file=file), place=row.place)


def _read_evidence(row: Row, *, file: Path) -> str:
    value = row.fields.get("evidence")
    if is_empty(value):
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list):
        return " ".join(value).strip() if all(isinstance(part, str) for part in value) else ""
    problem = f"evidence must be text or a list of texts, and is {value!r:.40}"
    raise make_row_error(problem, row, path=file, key="evidence")


SHIPPED = Path(__file__).parent / "data" / "prompts.toml"
SHIPPED_EVIDENCE = Path(__file__).parent / "data" / "prompts_evidence.toml"
_PLACES = re.compile(r"\{([^{}\s]*)\}")


class AnswerWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer word for each label."""

    supports: Text = msgspec.field(name=ClaimLabel.SUPPORTS.value)
    refutes: Text = msgspec.field(name=ClaimLabel.REFUTES.value)
    not_enough_info: Text = msgspec.field(name=ClaimLabel.NOT_ENOUGH_INFO.value)


class PromptTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Text
    text: Text
    answers: AnswerWords = AnswerWords(" True", " False", " Unknown")

    def __post_init__(self) -> None:
        places = _PLACES.findall(self.text)
        if "claim" not in places:
            raise ValueError("text has no {claim}")
        for unknown in set(places) - {"claim", "evidence"}:
            raise ValueError(f"text: {{{unknown}}} is not a placeholder; write {{claim}} or {{evidence}}")
        if len(set(self.words)) < len(LABELS):
            raise ValueError("answers: two labels have the same answer")

    @property
    def words(self) -> tuple[str, ...]:
        """The answer words in the order of LABELS."""
        return msgspec.structs.astuple(self.answers)

    @property
    def digest(self) -> str:
        """Digest of the template's text and answers, without the name: 12 hex digits."""
        return hashlib.sha256(msgspec.json.encode((self.text, self.words))).hexdigest()[:12]

    @property
    def has_evidence_placeholder(self) -> bool:
        return "{evidence}" in self.text

    @property
    def prefix(self) -> str:
        """The text before the first placeholder. All claims share this text."""
        return _PLACES.split(self.text, maxsplit=1)[0]

    def fill(self, claim: Claim) -> str:
        """Return the template's text after the prefix, filled with one claim. Braces in the claim are kept."""
        values = {"claim": claim.claim, "evidence": claim.evidence}
        return _PLACES.sub(lambda place: values.get(place[1], place[0]), self.text[len(self.prefix) :])


class _PromptsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompts: list[PromptTemplate] = []


def read_prompts(path: Path) -> list[PromptTemplate]:
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        prompts = []
        for row in read_rows(path):
            try:
                prompts.append(msgspec.convert(row.fields, PromptTemplate))
            except msgspec.ValidationError as error:
                raise make_row_error(str(error), row, path=path, key="prompts") from None
    else:
        prompts = read_toml(path, _PromptsFile).prompts
    refuse_duplicates("prompts", [(prompt.name, prompt.digest) for prompt in prompts], file=path)
    if not prompts:
        raise ConfigError.in_file(path, "has no templates; write them as [[prompts]] with name and text")
    return prompts


class VerificationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a verification run. An empty string selects the default. `limit`: 0 for all claims."""

    model: str = ""
    claims: str = ""
    prompts: str = ""
    limit: int = 300
    seed: int = 0
    batch_size: int = 16
    tensor_batch: int = 1
    awareness: Awareness = Awareness.FULL
    snapshot: bool = True
    calibrate: bool = True
    format: str = "parquet"
    site: str = ""

    @property
    def claims_path(self) -> Path:
        return Path(self.claims) if self.claims else SAMPLE


def choose_prompts(options: VerificationOptions, claims: Sequence[Claim]) -> list[PromptTemplate]:
    """Return the templates of the user's file, or the shipped templates. Raises ConfigError for missing evidence."""
    if options.prompts:
        path = Path(options.prompts)
    else:
        path = SHIPPED_EVIDENCE if all(claim.evidence for claim in claims) else SHIPPED
    prompts = read_prompts(path)
    prompt = next((prompt for prompt in prompts if prompt.has_evidence_placeholder), None)
    bare = next((claim for claim in claims if not claim.evidence), None)
    if prompt is not None and bare is not None:
        problem = (
            f"{bare.place}: claim {bare.id} has no evidence, and the template {prompt.name} of {path} has a"
            " placeholder for evidence; add evidence as text, or use a template without {evidence}"
        )
        raise ConfigError.in_file(options.claims_path, problem, key="evidence")
    return prompts


def run_identity(
    options: VerificationOptions, *, model: str, prompts: Sequence[PromptTemplate], claims: Sequence[Claim]
) -> dict[str, Any]:
    return {
        "model": model, "prompts": {prompt.name: prompt.digest for prompt in prompts},
        "claims": {"count": len(claims), "digest": digest_claims(claims)}, "awareness": options.awareness.value,
        **{name: getattr(options, name) for name in ("batch_size", "tensor_batch", "snapshot")},
    }  # fmt: skip
