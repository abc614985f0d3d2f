import pyarrow
import pyarrow.parquet
import pytest

from stoker.errors import ConfigError
from stoker.tuning.encoding import batch_indices, chunks, share
from stoker.tuning.job import Data, Sample, digest_samples, read_samples, split


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
        (
            "a.jsonl",
            b'{"input": "a", "target": "b"}\n{"input": "\xff", "target": "c"}\n',
            2,
            r"byte 12 \(0xff\) is not UTF-8",
        ),
    ],
)
def test_bad_data_is_named_with_file_and_line(tmp_path, name, content, line, said):
    with pytest.raises(ConfigError, match=said) as caught:
        read_samples(put(tmp_path, name, content))
    assert caught.value.file == str(tmp_path / name)
    assert caught.value.facts.get("line") == line


def test_parts_share_no_input_and_do_not_depend_on_order():
    samples = pairs(50) + pairs(10)
    data = Data("a.jsonl", evaluation_samples=8, held_out=0.2)
    parts = split(samples, data=data, seed=3)
    inputs = [{one.input for one in part} for part in (parts.training, parts.evaluation, parts.held_out)]
    assert [len(part) for part in inputs] == [32, 8, 10]
    assert len(set.union(*inputs)) == 50
    assert sum(map(len, (parts.training, parts.evaluation, parts.held_out))) == 60
    assert split(samples[::-1], data=data, seed=3) == parts
    assert split(samples, data=data, seed=4) != parts


def test_small_data_keeps_something_to_train_on():
    for count in range(3, 12):
        parts = split(pairs(count), data=Data("a.jsonl", evaluation_samples=100, held_out=0.89), seed=0)
        assert min(map(len, (parts.training, parts.evaluation, parts.held_out))) >= 1
    with pytest.raises(ConfigError, match=r"a\.jsonl: has 2 different inputs; tuning needs at least 3"):
        split([*pairs(2), *pairs(2)], data=Data("a.jsonl"), seed=0)


def test_samples_have_a_digest_of_their_content():
    assert digest_samples(pairs(3)) == digest_samples([Sample(one.input, one.target, "line 9") for one in pairs(3)])
    assert digest_samples(pairs(3)) != digest_samples(pairs(3)[::-1])


def test_every_epoch_has_each_sample_once_however_batches_fall():
    taken = [index for iteration in range(9) for index in batch_indices(iteration, batch=8, count=24, seed=1)]
    assert [sorted(taken[start : start + 24]) for start in (0, 24, 48)] == [list(range(24))] * 3
    assert taken[:24] != taken[24:48]
    taken = [index for iteration in range(7) for index in batch_indices(iteration, batch=10, count=7, seed=1)]
    assert [sorted(taken[start : start + 7]) for start in range(0, 70, 7)] == [list(range(7))] * 10
    assert batch_indices(5, batch=10, count=7, seed=1) == taken[50:60]
    assert batch_indices(0, batch=10, count=7, seed=2) != taken[:10]


def test_ranks_take_all_rows_once_and_nearly_as_many_tokens():
    rows = [(0,) * length for length in (3, 90, 4, 80, 5, 70, 6, 60, 7)]
    for size in (1, 2, 4, 9, 12):
        parts = [share(rows, rank=rank, size=size) for rank in range(size)]
        assert sorted(row for part in parts for row in part) == sorted(rows)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    tokens = [sum(map(len, share(rows, rank=rank, size=2))) for rank in (0, 1)]
    assert abs(tokens[0] - tokens[1]) < 40
    assert [len(some) for some in chunks(rows, most=4)] == [4, 4, 1]
    assert [len(some) for some in chunks(rows, most=0)] == [9]
    assert list(chunks([], most=4)) == []
