"""Compute hidden states and losses with a causal model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stoker.contexts.forward import Ids, ModelRunner
from stoker.contexts.language_model import CausalLM
from stoker.contexts.prompts import max_positions, refuse_empty_rows, refuse_one_text

BATCH_TOKENS = 2048


def compute_mean_hidden_states(model: CausalLM, texts: Sequence[str], *, most_tokens: int) -> npt.NDArray[np.float32]:
    """Return an embedding of each text, `[texts, width]`: the mean last hidden state of its first `most_tokens` tokens.

    Raises ValueError for an empty text.
    """
    rows = _tokenize(model, texts, most=most_tokens)
    refuse_empty_rows(rows, what="text")
    found: list[Any] = [None] * len(rows)
    with model.alone() as runner:
        for group in _group_rows_by_length(rows):
            ids, width = runner.pad_rows([rows[index] for index in group])
            lengths = torch.tensor([len(rows[index]) for index in group], device=runner.device)[:, None]
            mask = (torch.arange(width, device=runner.device) < lengths).long()
            states = runner.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            means = (states.float() * mask[:, :, None]).sum(dim=1) / lengths
            for index, mean in zip(group, means.cpu().numpy(), strict=True):
                found[index] = mean
    return np.stack(found) if found else np.zeros((0, 0), dtype=np.float32)


def compute_mean_losses(
    model: CausalLM, prompts: Sequence[Ids], samples: Sequence[tuple[Ids, Ids]], *, batch_size: int = 1
) -> list[float]:
    """Return the mean loss of each prompt (token ids) over samples, in nats per target token.

    A sample is a pair (input, target). Raises ValueError.
    """
    if not samples:
        raise ValueError("scoring prompts needs at least one sample")
    rows = list(prompts)
    refuse_empty_rows(rows, what="prompt")
    inputs, targets = [one for one, _ in samples], [target for _, target in samples]
    _check_lengths(model, rows, inputs, targets)
    losses = [0.0] * len(rows)
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    with model.alone() as runner:
        for start in range(0, len(order), batch_size):
            group = order[start : start + batch_size]
            for index, loss in zip(
                group, _mean_losses_of_rows(runner, [rows[i] for i in group], inputs, targets), strict=True
            ):
                losses[index] = loss
    return losses


def _mean_losses_of_rows(runner: ModelRunner, rows: list[Ids], inputs: list[Ids], targets: list[Ids]) -> list[float]:
    tails = [one + target[:-1] for one, target in zip(inputs, targets, strict=True)]
    if runner.can_share_prefixes:
        first, after = runner.prefill_with_tails(rows, [tails] * len(rows))
    means = []
    for number, row in enumerate(rows):
        total = 0.0
        for sample, target in enumerate(targets):
            if runner.can_share_prefixes:
                told = after[number][sample][-len(target) :]
                if len(told) < len(target):  # the input is empty, so the prompt's logits predict the first token
                    told = torch.cat([first[number][None], told.reshape(-1, first.shape[1])])
            else:
                told = runner.compute_all_logits([row + tails[sample]])[0, -len(target) :]
            wanted = torch.tensor(target, device=told.device)
            total += float(torch.nn.functional.cross_entropy(told.float(), wanted))
        means.append(total / len(targets))
    return means


def _check_lengths(model: CausalLM, rows: list[Ids], inputs: list[Ids], targets: list[Ids]) -> None:
    longest = max(map(len, rows), default=0)
    reads = max_positions(model.model.config)
    for number, (one, target) in enumerate(zip(inputs, targets, strict=True)):
        if not target:
            raise ValueError(f"the target of sample {number} is empty; nothing can be scored")
        whole = longest + len(one) + len(target)
        if reads and whole > reads:
            told = f"sample {number} has {whole} tokens with a prompt of {longest} before it"
            raise ValueError(f"{told}; the model accepts at most {reads}. Shorten the sample or the prompts")


def _tokenize(model: CausalLM, texts: Sequence[str], *, most: int) -> list[Ids]:
    refuse_one_text(texts, what="text")
    if not texts:
        return []
    # Pass only the beginning of a long text, because the tokenizer would read all of it before it cuts it.
    given = [text[: 64 * most] for text in texts]
    return [tuple(ids[:most]) for ids in model.tokenizer(given, add_special_tokens=False)["input_ids"]]


def _group_rows_by_length(rows: list[Ids]) -> list[list[int]]:
    groups: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lambda index: -len(rows[index])):
        if not groups or (len(groups[-1]) + 1) * len(rows[groups[-1][0]]) > BATCH_TOKENS:
            groups.append([])
        groups[-1].append(index)
    return groups
