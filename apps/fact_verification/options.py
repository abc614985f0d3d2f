"""The options of a run, and what makes two runs the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stoker.apps.fact_verification.claims import (
    SAMPLE,
    SHIPPED,
    SHIPPED_EVIDENCE,
    Claim,
    PromptTemplate,
    digest_claims,
    read_prompts,
)
from stoker.contexts import Awareness
from stoker.errors import ConfigError


class VerificationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one run. `limit` 0 is every claim; an empty text is not given.

    `batch_size` is claims a call; `tensor_batch` is claims in one tensor inside it: 1 as in the paper.
    """

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
        """The claim file: the shipped sample when none was given."""
        return Path(self.claims) if self.claims else SAMPLE


def choose_prompts(options: VerificationOptions, claims: Sequence[Claim]) -> list[PromptTemplate]:
    """The templates: those given, else the shipped ones for claims with evidence or without.

    Raises ConfigError when a template wants evidence that a claim does not have.
    """
    if options.prompts:
        path = Path(options.prompts)
    else:
        path = SHIPPED_EVIDENCE if all(claim.evidence for claim in claims) else SHIPPED
    prompts = read_prompts(path)
    for prompt in prompts:
        bare = next((claim for claim in claims if not claim.evidence), None)
        if prompt.wants_evidence and bare is not None:
            raise ConfigError(
                f"{options.claims_path}: {bare.place}: claim {bare.id} has no evidence, and the template {prompt.name}"
                f" of {path} has a place for it; add evidence as text, or use a template without {{evidence}}",
                file=str(options.claims_path),
                key="evidence",
            )
    return prompts


def parameters(
    options: VerificationOptions, *, model: str, prompts: Sequence[PromptTemplate], claims: Sequence[Claim]
) -> dict[str, Any]:
    """What makes two runs the same. How the answers are read and written at the end is not part of it."""
    return {
        "model": model,
        "prompts": {prompt.name: prompt.digest for prompt in prompts},
        "claims": {"count": len(claims), "digest": digest_claims(claims)},
        "batch_size": options.batch_size,
        "tensor_batch": options.tensor_batch,
        "awareness": options.awareness.value,
        "snapshot": options.snapshot,
    }
