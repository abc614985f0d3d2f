import json

import pyarrow
import pyarrow.feather
import pytest

from stoker.datafile import read_lines, read_rows
from stoker.errors import ConfigError

TABLE = pyarrow.table({"id": range(10_000), "text": [f"row {number}" for number in range(10_000)]})


def write_file(path, table=TABLE):
    with pyarrow.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=3000)


def write_stream(path, table=TABLE):
    with pyarrow.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)


def write_feather(path, table=TABLE):
    pyarrow.feather.write_feather(table, path, compression="lz4")


def save_data_set(folder, *, shards=2):
    """Write the files of `Dataset.save_to_disk` without its descriptive fields."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{shards:05}.arrow" for number in range(shards)]
    rows = TABLE.num_rows // shards
    for number, name in enumerate(names):
        write_stream(folder / name, TABLE.slice(number * rows, rows))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


@pytest.mark.parametrize(
    ("name", "write"), [("a.arrow", write_file), ("a.arrow", write_stream), ("a.feather", write_feather)]
)
def test_arrow_and_feather_are_read(tmp_path, name, write):
    write(tmp_path / name)
    rows = list(read_rows(tmp_path / name))
    assert [row.fields for row in rows] == TABLE.to_pylist()
    assert (rows[0].number, rows[0].place, rows[-1].place) == (1, "row 1", "row 10000")


def test_saved_hugging_face_data_set_is_read(tmp_path):
    save_data_set(tmp_path / "one")
    rows = list(read_rows(tmp_path / "one"))
    assert [row.fields for row in rows] == TABLE.to_pylist()
    assert rows[7_000].place == "row 7001"


def test_splits_are_named_unless_there_is_one(tmp_path):
    for split in ("train", "test"):
        save_data_set(tmp_path / split, shards=1)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=r"has the splits train, test; give the path of one split, such as .*train"):
        read_rows(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert len(list(read_rows(tmp_path))) == 10_000


def test_rows_before_a_cut_are_given(tmp_path):
    path = tmp_path / "a.arrow"
    with pyarrow.ipc.new_stream(path, TABLE.schema) as stream:
        stream.write_table(TABLE, max_chunksize=1000)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    given = []
    with pytest.raises(ConfigError, match=r"a\.arrow: cannot be read as Arrow after row \d+000: "):
        given.extend(row.number for row in read_rows(path))
    assert given == list(range(1, given[-1] + 1))
    assert 3000 <= given[-1] <= 5000


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.arrow", b"", "cannot be read as Arrow from its beginning"),
        ("a.arrow", b"ARROW1 and no more", "cannot be read as Arrow from its beginning"),
        ("a.feather", b"FEA1...", "a file of Feather version 1"),
        ("a.arrow.gz", b"", "decompress it first; only .csv, .tsv, .jsonl, .ndjson files may be compressed"),
        ("a.xlsx", b"", "name it .csv, .tsv, .jsonl, .ndjson, .parquet, .arrow, .feather, .ipc"),
    ],
)
def test_files_without_a_table_are_refused(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=says):
        list(read_rows(tmp_path / name))


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (None, "has no state.json, which Dataset.save_to_disk writes"),
        ("{}", "is not a list of _data_files as save_to_disk writes it"),
        ('{"_data_files": [{"filename": "../b"}]}', "is not a list of _data_files"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "gone.arrow: no such file, although .* lists it"),
    ],
)
def test_folders_without_a_data_set_are_refused(tmp_path, state, says):
    if state is not None:
        (tmp_path / "state.json").write_text(state)
    with pytest.raises(ConfigError, match=says):
        list(read_rows(tmp_path))


def test_lines_come_as_bytes_with_their_numbers(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf{}\r\n\n  \n\xff\n{")
    assert [(line.number, line.data) for line in read_lines(tmp_path / "a.jsonl")] == [
        (1, b"{}"),
        (4, b"\xff"),
        (5, b"{"),
    ]
    with pytest.raises(ConfigError, match="is a folder"):
        read_lines(tmp_path)
    (tmp_path / "a.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match=r"its name ends in \.gz, but it is plain text; rename it to a"):
        list(read_lines(tmp_path / "a.gz"))
