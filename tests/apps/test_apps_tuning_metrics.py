"""Expected values are from rouge-score 0.1.2 and sacrebleu 2.6.0."""

import pytest

from stoker.tuning.job import Metric
from stoker.tuning.metrics import MetricSums, count_words, of_text, rouge_l

WRITTEN = ["The cat is on the mat.", "There is a cat on the mat", "He said: \"It's 3.5 km, isn't it?\""]
WANTED = ["The cat sat on the mat.", "A cat sits on the mat.", 'She said: "It is 3.5 km, is it not?"']


@pytest.mark.parametrize(
    ("written", "wanted", "f1"),
    [
        ("the cat is on the mat", "the cat sat on the mat", 5 / 6),
        ("The CAT!", "the cat", 1.0),
        ("", "the cat", 0.0),
        ("...", "...", 0.0),
        ("a b c d", "d c b a", 0.25),
    ],
)
def test_rouge_l_has_known_values(written, wanted, f1):
    assert rouge_l(written, wanted) == pytest.approx(f1)


def tally(written, wanted):
    return sum(
        (of_text(one, other) + MetricSums(samples=1.0) for one, other in zip(written, wanted, strict=True)),
        start=MetricSums(),
    )


@pytest.mark.parametrize(
    ("written", "wanted", "bleu", "rouge"),
    [
        (WRITTEN, WANTED, 0.24792868647, (5 / 6, 10 / 13, 0.6)),
        (WRITTEN[:1], WANTED[:1], 0.48892302243, (5 / 6,)),
        (["no match at all"], ["completely different words"], 0.0, (0.0,)),
        (["a b c d e"], ["a b d c e f"], 0.21994586238, (8 / 11,)),
        (["1-2, 3.4 x-y &amp; <z>"], ["1-2, 3,4 x-y & <z>"], 0.65803700625, (14 / 15,)),
    ],
)
def test_bleu_and_rouge_equal_those_of_standard_packages(written, wanted, bleu, rouge):
    assert tally(written, wanted).value(Metric.BLEU) == pytest.approx(bleu, rel=1e-9)
    assert [rouge_l(one, other) for one, other in zip(written, wanted, strict=True)] == pytest.approx(rouge)
    assert tally(written, wanted).value(Metric.ROUGE) == pytest.approx(sum(rouge) / len(rouge))


def test_sums_of_the_ranks_add_up_to_the_sums_of_all_samples():
    whole = tally(WRITTEN, WANTED)
    parts = [tally(WRITTEN[rank::2], WANTED[rank::2]) for rank in (0, 1)]
    assert (parts[0] + parts[1]).numbers() == pytest.approx(whole.numbers())
    assert MetricSums.from_numbers(whole.numbers()) == whole
    assert len(whole.numbers()) == 15


def test_bleu_splits_words_like_wmt():
    assert count_words('He said: "It costs $3.50, no?"') == 12
    assert tally(WANTED, WANTED).value(Metric.BLEU) == pytest.approx(1.0)
