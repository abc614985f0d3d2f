"""Measure generated texts as sums over samples, which ranks can add.

ROUGE-L (Lin, 2004) is the F1 of the longest common subsequence of words. As in the package `rouge-score`, a word is a
run of lower-case letters and digits, without stemming. BLEU (Papineni et al., 2002) is corpus BLEU with n-grams of one
to four words. As in sacreBLEU, n-gram orders without a match use "exponential smoothing", and words are split as in
WMT's 13a tokenizer.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from stoker.errors import ConfigError
from stoker.tuning.job import Job, Metric

_LONGEST_NGRAM = 4
_WORD = re.compile(r"[a-z0-9]+")
_PUNCTUATION_RULES = (
    (re.compile(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])"), r" \1 "),
    (re.compile(r"([^0-9])([\.,])"), r"\1 \2 "),
    (re.compile(r"([\.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)


class MetricSums(msgspec.Struct, frozen=True):
    """Sums over samples. `matches`, `grams`: for n-grams of one to four words, the number that match the target and the
    number generated. `written`, `wanted`: numbers of words in generated texts and in targets.
    """

    samples: float = 0.0
    tokens: float = 0.0
    loss: float = 0.0
    correct: float = 0.0
    rouge: float = 0.0
    matches: tuple[float, ...] = (0.0,) * _LONGEST_NGRAM
    grams: tuple[float, ...] = (0.0,) * _LONGEST_NGRAM
    written: float = 0.0
    wanted: float = 0.0

    def __add__(self, other: MetricSums) -> MetricSums:
        return MetricSums.from_numbers([a + b for a, b in zip(self.to_numbers(), other.to_numbers(), strict=True)])

    def to_numbers(self) -> list[float]:
        return [
            self.samples, self.tokens, self.loss, self.correct, self.rouge, *self.matches, *self.grams, self.written,
            self.wanted,
        ]  # fmt: skip

    @staticmethod
    def from_numbers(numbers: Sequence[float]) -> MetricSums:
        samples, tokens, loss, correct, rouge, *grams, written, wanted = numbers
        matches, grams = grams[:_LONGEST_NGRAM], grams[_LONGEST_NGRAM:]
        return MetricSums(samples, tokens, loss, correct, rouge, tuple(matches), tuple(grams), written, wanted)

    def value(self, metric: Metric) -> float:
        """Return the value of a metric over all samples; NaN without samples."""
        if not self.samples:
            return math.nan
        if metric is Metric.BLEU:
            return self._bleu()
        if metric is Metric.LOSS:
            return self.loss / self.tokens
        return (self.correct if metric is Metric.ACCURACY else self.rouge) / self.samples

    def _bleu(self) -> float:
        if not self.written or not self.matches[0]:
            return 0.0
        logs, halved = 0.0, 1.0
        for matches, grams in zip(self.matches, self.grams, strict=True):
            if not grams:
                return 0.0
            if not matches:
                halved /= 2
            logs += math.log((matches or halved) / grams)
        brevity = min(0.0, 1 - self.wanted / self.written)
        return math.exp(brevity + logs / _LONGEST_NGRAM)


def count_words(text: str) -> int:
    return len(_tokenize_13a(text))


def refuse_unreachable(job: Job, targets: Sequence[str]) -> None:
    """Raise ConfigError if the metric is equal for all prompts, or if no prompt can reach the target.

    Args:
        job: The job.
        targets: Targets of the evaluation samples.
    """
    if job.until.metric is Metric.BLEU and all(count_words(target) < _LONGEST_NGRAM for target in targets):
        raise ConfigError(
            f"[until] metric = 'bleu' is 0 for every prompt: it counts four words in a row, and no target of"
            f" {job.data.path} for evaluation has four words; choose 'accuracy' or 'rouge-l'",
            file=job.data.path, key="metric",
        )  # fmt: skip
    if job.until.metric is not Metric.ROUGE:
        return
    # ROUGE-L counts only words of a to z and digits, so a target in another script always scores 0.
    best = sum(bool(_tokenize_for_rouge(target)) for target in targets) / max(1, len(targets))
    words = f"it counts words of the letters a to z and digits, and {{}} of {job.data.path} have none"
    if not best:
        raise ConfigError(
            f"[until] metric = 'rouge-l' is 0 for every prompt: {words.format('the targets')}; choose 'accuracy' or"
            " 'loss'",
            file=job.data.path, key="metric",
        )  # fmt: skip
    if job.until.reach is not None and job.until.reach > best:
        without = f"{1 - best:.0%} of the targets"
        raise ConfigError(
            f"[until] reach = {job.until.reach:g} can never be reached: {words.format(without)}, so that rouge-l is at"
            f" most {best:.3g}; lower it, or choose 'accuracy' or 'loss'",
            file=job.data.path, key="reach",
        )  # fmt: skip


def measure_text(written: str, wanted: str) -> MetricSums:
    ours, theirs = _tokenize_13a(written), _tokenize_13a(wanted)
    matches, grams = [], []
    for order in range(1, _LONGEST_NGRAM + 1):
        there, meant = _count_ngrams(ours, order), _count_ngrams(theirs, order)
        matches.append(float(sum((there & meant).values())))
        grams.append(float(sum(there.values())))
    return MetricSums(
        rouge=rouge_l(written, wanted), matches=tuple(matches), grams=tuple(grams), written=float(len(ours)),
        wanted=float(len(theirs)),
    )  # fmt: skip


def rouge_l(written: str, wanted: str) -> float:
    ours, theirs = _tokenize_for_rouge(written), _tokenize_for_rouge(wanted)
    common = _longest_common_subsequence(ours, theirs)
    if not common:
        return 0.0
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


def _longest_common_subsequence(one: list[str], other: list[str]) -> int:
    row = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for at, against in enumerate(other, start=1):
            above = row[at]
            row[at] = diagonal + 1 if word == against else max(above, row[at - 1])
            diagonal = above
    return row[-1]


def _count_ngrams(words: list[str], order: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[at : at + order]) for at in range(len(words) - order + 1))


def _tokenize_for_rouge(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _tokenize_13a(text: str) -> list[str]:
    text = f" {text.replace('-' + chr(10), '').replace(chr(10), ' ')} "
    for mark, plain in (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")):
        text = text.replace(mark, plain)
    for pattern, spaced in _PUNCTUATION_RULES:
        text = pattern.sub(spaced, text)
    return text.split()
