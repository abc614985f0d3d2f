import gzip
import io
import json
import lzma
import random

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from stoker.apps.fact_verification.options import SAMPLE, Claim, ClaimLabel, draw_claims, read_claims
from stoker.datafile import read_lines, read_rows
from stoker.errors import ConfigError

JSONL = '{"id": 7, "claim": "A.", "label": "SUPPORTS"}\n\n{"id": 8, "claim": "B, c.", "label": "not_enough_info"}\n'
CSV = 'claim,label,evidence\nA.,refutes,\n"B, ""c"".\nnext line",Supported,It is so.\n'


def put(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_jsonl_of_fever_is_read(tmp_path):
    claims = read_claims(put(tmp_path, "a.jsonl", JSONL))
    assert claims == [
        Claim(id="7", claim="A.", label=ClaimLabel.SUPPORTS, evidence="", place="line 1"),
        Claim(id="8", claim="B, c.", label=ClaimLabel.NOT_ENOUGH_INFO, evidence="", place="line 3"),
    ]
    assert read_claims(put(tmp_path, "a.jsonl.gz", gzip.compress(JSONL.encode()))) == claims


def test_csv_with_quotes_newlines_and_a_bom_is_read(tmp_path):
    claims = read_claims(put(tmp_path, "a.csv", b"\xef\xbb\xbf" + CSV.encode()))
    assert [(one.id, one.claim, one.label, one.evidence) for one in claims] == [
        ("2", "A.", ClaimLabel.REFUTES, ""),
        ("4", 'B, "c".\nnext line', ClaimLabel.SUPPORTS, "It is so."),
    ]


def test_parquet_with_lists_of_evidence_is_read(tmp_path):
    table = pyarrow.table({"claim": ["A.", "B."], "label": ["SUPPORTS", "REFUTES"], "evidence": [["x.", "y."], []]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert [(one.id, one.evidence) for one in read_claims(tmp_path / "a.parquet")] == [("1", "x. y."), ("2", "")]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '{"claim": "A.", "label": "SUPPORTS"}\n{"claim": "B."', ["line 2", "is not JSON"]),
        ("a.jsonl", '{"claim": "A."}\n', ["line 1", "label is missing", "the row has claim"]),
        ("a.jsonl", '{"claim": " ", "label": "SUPPORTS"}\n', ["line 1", "claim must be text, and is empty"]),
        ("a.jsonl", '{"claim": "A.", "label": "MAYBE"}\n', ["line 1", "label is 'MAYBE'", "NOT ENOUGH INFO"]),
        ("a.jsonl", '{"claim": "A.", "label": "true", "id": [1]}\n', ["line 1", "id must be a number or text"]),
        ("a.jsonl", JSONL + JSONL, ["line 4", "id 7", "line 1"]),
        ("a.jsonl", "[1]\n", ["line 1", "is a list, but must be a JSON object"]),
        ("a.jsonl", "", ["has no claims"]),
        ("a.csv", "claim,label\nA, b.,SUPPORTS\n", ["line 2", "has 3 cells, the header has 2"]),
        ("a.csv", 'claim,label\n"A.,SUPPORTS\n', ["line 2"]),
        ("a.parquet", "PAR1 nothing", ["cannot be read as Parquet"]),
        ("a.txt", "A.", ["its suffix names no known format", ".jsonl"]),
    ],
)
def test_invalid_claims_file_error_names_the_file_and_the_fault(tmp_path, name, text, says):
    path = put(tmp_path, name, text)
    with pytest.raises(ConfigError) as caught:
        read_claims(path)
    for part in (str(path), *says):
        assert part in str(caught.value)


def test_missing_file_and_folder_are_refused(tmp_path):
    for path, says in (
        (tmp_path / "no.csv", "no such file"),
        (tmp_path, "has no state.json, .* give the path of a file"),
    ):
        with pytest.raises(ConfigError, match=says):
            list(read_rows(path))


def test_shipped_sample_has_333_claims_of_each_label():
    claims = read_claims(SAMPLE)
    assert len(claims) == 999
    assert all(sum(claim.label is label for claim in claims) == 333 for label in ClaimLabel)


def test_sampled_claims_keep_label_shares_and_file_order():
    labels = [ClaimLabel.SUPPORTS] * 60 + [ClaimLabel.REFUTES] * 30 + [ClaimLabel.NOT_ENOUGH_INFO] * 10
    claims = [Claim(id=str(n), claim="x", label=label, evidence="", place="") for n, label in enumerate(labels)]
    drawn = draw_claims(claims, limit=21, seed=3)
    assert [sum(one.label is label for one in drawn) for label in ClaimLabel] == [13, 6, 2]
    assert [int(one.id) for one in drawn] == sorted(int(one.id) for one in drawn)
    assert drawn == draw_claims(claims, limit=21, seed=3) != draw_claims(claims, limit=21, seed=4)
    assert draw_claims(claims, limit=None, seed=3) == claims == draw_claims(claims, limit=1000, seed=3)


ROWS = [{"id": n, "claim": f"Claim {n} über {n * n}."} for n in range(2000)]


def packed(ending):
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    if ".csv" in ending:
        text = "id,claim\n" + "".join(f'{row["id"]},"{row["claim"]}"\n' for row in ROWS)
    if ending == ".parquet":
        file = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
        return file.getvalue()
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(ending[-3:], bytes)
    return pack(text.encode())


ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".csv", ".csv.gz", ".csv.xz", ".parquet")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("how", ["cut off", "garbage", "not text and cut off", "damaged"])
def test_truncated_or_damaged_file_error_names_the_file_and_place(tmp_path, ending, how):
    whole, chance = packed(ending), random.Random(7)
    middle = len(whole) // 2
    noise = b"\xff" + chance.randbytes(5000).translate(None, b"\r\n")
    data = {
        "cut off": whole[: whole.rfind(b"\xc3", 0, middle) + 1] if ending in (".jsonl", ".csv") else whole[:middle],
        "garbage": noise,
        "not text and cut off": {".gz": gzip.compress, ".xz": lzma.compress}.get(ending[-3:], bytes)(noise)[:100],
        "damaged": whole[:middle] + b"\xff\x00" * 64 + whole[middle + 128 :],
    }[how]
    path = put(tmp_path, f"a{ending}", data)
    with pytest.raises(ConfigError) as caught:
        list(read_rows(path))
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    assert any(
        place in said for place in (": line ", " after line ", " after row ", " its first row", " its beginning")
    )
    if how == "cut off" and ending.endswith("z"):
        assert "is truncated after line " in said
    assert "\n" not in said


def test_unreadable_value_is_named_by_its_place(tmp_path):
    table = pyarrow.table({"at": pyarrow.array([1, 10**18 + 1], pyarrow.timestamp("us"))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet: cannot be read as Parquet"):
        list(read_rows(tmp_path / "a.parquet"))
    with pytest.raises(ConfigError, match="line 1: is not JSON"):
        list(read_rows(put(tmp_path, "a.jsonl", "[" * 100_000)))


def test_two_columns_of_one_name_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"line 1: two columns are called claim; give each its own name"):
        list(read_rows(put(tmp_path, "a.csv", "claim,label,claim\nA.,B.,C.\n")))
    table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="its schema: two columns are called a"):
        list(read_rows(tmp_path / "a.parquet"))
    [row] = read_rows(put(tmp_path, "b.csv", "claim,label,,\nA.,B.,,\n"))
    assert (row.fields["claim"], row.fields["label"]) == ("A.", "B."), "columns without a name are ignored"


@pytest.mark.parametrize("text", [r'{"id": "\ud800"}', r'{"id": {"a": ["b\uDC00"]}}'])
def test_lone_surrogate_is_refused_with_its_line(tmp_path, text):
    whole = r'{"id": "\ud83d\ude00 and \\ud800"}' + "\n"
    with pytest.raises(ConfigError, match=r"line 2: contains \\u[0-9a-f]{4}, half of a character"):
        list(read_rows(put(tmp_path, "a.jsonl", whole + text + "\n")))
    [row] = read_rows(put(tmp_path, "b.jsonl", whole))
    assert row.fields["id"] == "\U0001f600 and \\ud800"


def test_csv_cell_may_hold_a_whole_document(tmp_path):
    text = "a, b\n" * 40_000
    (tmp_path / "rows.csv").write_text(f'id,text\n1,"{text}"\n')
    (row,) = read_rows(tmp_path / "rows.csv")
    assert row.fields == {"id": "1", "text": text}


# ---- tables


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
    """Write a data set like `Dataset.save_to_disk`, without descriptive fields."""
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


def test_data_set_with_several_splits_requires_the_path_of_a_split(tmp_path):
    for split in ("train", "test"):
        save_data_set(tmp_path / split, shards=1)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=r"has the splits train, test; give the path of one split, such as .*train"):
        read_rows(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert len(list(read_rows(tmp_path))) == 10_000


def test_rows_before_the_truncation_of_an_arrow_file_are_read(tmp_path):
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
        (
            "a.arrow.gz",
            b"",
            "is compressed; decompress it, because only .csv, .tsv, .jsonl, .ndjson files may be compressed",
        ),
        (
            "a.xlsx",
            b"",
            "give the file one of the suffixes .csv, .tsv, .jsonl, .ndjson, .parquet, .arrow, .feather, .ipc",
        ),
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


def test_lines_are_read_as_bytes_with_their_line_numbers(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf{}\r\n\n  \n\xff\n{")
    found = [(line.number, line.data) for line in read_lines(tmp_path / "a.jsonl")]
    assert found == [(1, b"{}"), (4, b"\xff"), (5, b"{")]
    with pytest.raises(ConfigError, match="is a folder"):
        read_lines(tmp_path)
    (tmp_path / "a.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match=r"its name ends in \.gz, but it is plain text; rename it to a"):
        list(read_lines(tmp_path / "a.gz"))
