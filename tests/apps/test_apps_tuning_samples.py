import math

import pyarrow
import pyarrow.parquet
import pytest

from stoker.errors import ConfigError
from stoker.tuning.encoding import batch_indices, rows_of_rank, split_into_chunks
from stoker.tuning.job import Data, Metric, Sample, digest_samples, read_samples, split
from stoker.tuning.metrics import MetricSums, count_words, measure_text, rouge_l
from stoker.tuning.pace import IterationPace, Part, PartClock, communication_share


def put(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Data(str(path))


def pairs(count):
    return [Sample(f"question {number}", f"answer {number % 3}") for number in range(count)]


def test_pairs_are_read_from_every_format(tmp_path):
    rows = [{"input": "a, b", "target": "yes"}, {"input": "ü", "target": "no"}]
    jsonl = put(tmp_path, "a.jsonl", '{"input": "a, b", "target": "yes"}\n\n{"input": "ü", "target": "no"}\n')
    table = put(tmp_path, "a.csv", 'input,target\n"a, b",yes\nü,no\n')
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    wanted = [(row["input"], row["target"]) for row in rows]
    for data in (jsonl, table, Data(str(tmp_path / "a.parquet"))):
        assert [(one.input, one.target) for one in read_samples(data)] == wanted
    assert [one.place for one in read_samples(jsonl)] == ["line 1", "line 3"]


@pytest.mark.parametrize(
    ("name", "content", "line", "said"),
    [
        ("a.jsonl", b"\n\n", None, "is empty; give rows with the fields input and target"),
        ("a.jsonl", b'{"input": "a", "label": "b"}\n', 1, r"target is missing \(the row has input, label\)"),
        ("a.jsonl", b'{"input": "a", "target": "b"}\n{"input": "a", "target": " "}\n', 2, "target must be text"),
        ("a.jsonl", b'{"input": "a", "target": "b"}\n{"input": "\xff"}\n', 2, r"byte 12 \(0xff\) is not UTF-8"),
    ],
)
def test_bad_data_is_named_with_file_and_line(tmp_path, name, content, line, said):
    with pytest.raises(ConfigError, match=said) as caught:
        read_samples(put(tmp_path, name, content))
    assert caught.value.file == str(tmp_path / name)
    assert caught.value.facts.get("line") == line


def test_data_split_shares_no_input_and_ignores_sample_order():
    samples = pairs(50) + pairs(10)
    data = Data("a.jsonl", evaluation_samples=8, held_out=0.2)
    parts = split(samples, data=data, seed=3)
    inputs = [{one.input for one in part} for part in (parts.training, parts.evaluation, parts.held_out)]
    assert [len(part) for part in inputs] == [32, 8, 10]
    assert len(set.union(*inputs)) == 50
    assert sum(map(len, (parts.training, parts.evaluation, parts.held_out))) == 60
    assert split(samples[::-1], data=data, seed=3) == parts
    assert split(samples, data=data, seed=4) != parts


def test_split_of_small_data_leaves_no_part_empty():
    for count in range(3, 12):
        parts = split(pairs(count), data=Data("a.jsonl", evaluation_samples=100, held_out=0.89), seed=0)
        assert min(map(len, (parts.training, parts.evaluation, parts.held_out))) >= 1
    with pytest.raises(ConfigError, match=r"a\.jsonl: has 2 different inputs; tuning needs at least 3"):
        split([*pairs(2), *pairs(2)], data=Data("a.jsonl"), seed=0)


def test_sample_digest_depends_on_content_and_order():
    assert digest_samples(pairs(3)) == digest_samples([Sample(one.input, one.target, "line 9") for one in pairs(3)])
    assert digest_samples(pairs(3)) != digest_samples(pairs(3)[::-1])


def test_each_epoch_uses_every_sample_once_for_any_batch_size():
    taken = [index for iteration in range(9) for index in batch_indices(iteration, batch=8, count=24, seed=1)]
    assert [sorted(taken[start : start + 24]) for start in (0, 24, 48)] == [list(range(24))] * 3
    assert taken[:24] != taken[24:48]
    taken = [index for iteration in range(7) for index in batch_indices(iteration, batch=10, count=7, seed=1)]
    assert [sorted(taken[start : start + 7]) for start in range(0, 70, 7)] == [list(range(7))] * 10
    assert batch_indices(5, batch=10, count=7, seed=1) == taken[50:60]
    assert batch_indices(0, batch=10, count=7, seed=2) != taken[:10]


def test_ranks_share_all_rows_evenly_by_count_and_tokens():
    rows = [(0,) * length for length in (3, 90, 4, 80, 5, 70, 6, 60, 7)]
    for size in (1, 2, 4, 9, 12):
        parts = [rows_of_rank(rows, rank=rank, size=size) for rank in range(size)]
        assert sorted(row for part in parts for row in part) == sorted(rows)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    tokens = [sum(map(len, rows_of_rank(rows, rank=rank, size=2))) for rank in (0, 1)]
    assert abs(tokens[0] - tokens[1]) < 40
    assert [len(some) for some in split_into_chunks(rows, most=4)] == [4, 4, 1]
    assert [len(some) for some in split_into_chunks(rows, most=0)] == [9]
    assert list(split_into_chunks([], most=4)) == []


# ---- metrics; expected values are from rouge-score 0.1.2 and sacrebleu 2.6.0


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
        (measure_text(one, other) + MetricSums(samples=1.0) for one, other in zip(written, wanted, strict=True)),
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


def test_metric_sums_of_the_ranks_add_up_to_those_of_all_samples():
    whole = tally(WRITTEN, WANTED)
    parts = [tally(WRITTEN[rank::2], WANTED[rank::2]) for rank in (0, 1)]
    assert (parts[0] + parts[1]).to_numbers() == pytest.approx(whole.to_numbers())
    assert MetricSums.from_numbers(whole.to_numbers()) == whole
    assert len(whole.to_numbers()) == 15


def test_bleu_splits_words_like_wmt():
    assert count_words('He said: "It costs $3.50, no?"') == 12
    assert tally(WANTED, WANTED).value(Metric.BLEU) == pytest.approx(1.0)


# ---- forecasts


def test_remaining_time_assumes_the_slowest_recent_iterations():
    pace = IterationPace(evaluate_every=10)
    assert pace.left_s(100) is None
    pace.iterations_s.extend((0.5, 0.75, 0.25))
    assert pace.left_s(100) == 75.0
    pace.evaluations_s.extend((2.0, 3.0))
    assert pace.left_s(95) == 10 * 3.0 + 95 * 0.75
    assert pace.left_s(0) == 0.0
    pace.iterations_s.extend([0.1] * 50)
    assert pace.left_s(10) == pytest.approx(3.0 + 1.0), "a single slow iteration is forgotten"


def test_time_accounting_continues_from_earlier_runs():
    clock = PartClock()
    with clock.time(Part.COMPUTE):
        sum(range(100_000))
    spent_s = clock.spent_s()
    assert spent_s["compute"] > 0
    assert math.isclose(sum(spent_s.values()), spent_s["compute"])
    later = PartClock()
    later.add_earlier_seconds({"compute": 3.0, "communication": 1.0, "of another version": 9.0})
    assert later.spent_s()["compute"] == 3.0
    assert communication_share(later.spent_s()) == 0.25
    assert communication_share(PartClock().spent_s()) == 0.0
