from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ConfigError
from stoker.manager.sim.client import Arrival
from stoker.manager.sim.workload import TokenObjective, Trace, TraceFormat
from stoker.manager.study.traces import read_trace
from stoker.protocol.calls import Objective
from stoker.site import Duration

PHILLY = """timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:55,66.0,1,66.0,11cb48
2017-10-09 06:13:03,2951.0,2,5902.0,6214e9
2017-10-09 06:13:33,0.5,1,0.5,11cb48
"""
ELASTICFLOW = """job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration
a,5010,7628,bert,5985,64,1,1265
b,5016,14137,resnet50,6955,64,2,2066
c,5016,14137,bert,6955,64,1,10
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
SOON = TokenObjective(Duration(0.5), Duration(0.25))
SLINFER: list[dict[str, Any]] = [
    {"HashFunction": "late", "timestamps": [4.0, 9.5], "input": [10, 20], "output": [1, 2], "total_cnt": 2},
    {"HashFunction": "never", "timestamps": [], "input": [], "output": []},
    {"HashFunction": "early", "timestamps": [2.5, 9.0], "input": [30, 40], "output": [3, 4]},
]
FUNCTION = '[{{"HashFunction": "f", "timestamps": {}, "input": {}, "output": {}}}]'.format
PLAIN = "at_s,context,items\n0,llm,5\n0.5,llm,6\n0.5,encoder,7\n"

P, E, A, S, C = (
    TraceFormat.PHILLY, TraceFormat.ELASTICFLOW, TraceFormat.AZURE_LLM, TraceFormat.SLINFER, TraceFormat.CSV
)  # fmt: skip
JOBS = {P, E}
Write = Callable[..., Trace]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def trace(format: TraceFormat, text: str | bytes, **settings: Any) -> Trace:
        raw = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "trace").write_bytes(raw)
        if format in JOBS:
            settings = {"item_s": Duration(10.0)} | settings
        if format is not C and "contexts" not in settings:
            settings = {"context": "llm"} | settings
        return Trace(format=format, file="trace", **settings)

    return trace


def test_philly_jobs_are_sorted_and_become_one_call_per_gpu(tmp_path: Path, write: Write) -> None:
    calls = list(read_trace(write(P, PHILLY), folder=tmp_path))
    assert calls == [
        Arrival(0.0, "llm", 296), Arrival(0.0, "llm", 296), Arrival(30.0, "llm", 1), Arrival(2932.0, "llm", 7)
    ]  # fmt: skip


def test_single_philly_cluster_can_be_read(tmp_path: Path, write: Write) -> None:
    trace = write(P, PHILLY, cluster="11cb48")
    assert [call.at_s for call in read_trace(trace, folder=tmp_path)] == [0.0, 2902.0]
    with pytest.raises(ConfigError, match="no call matches start, for and cluster"):
        read_trace(write(P, PHILLY, cluster="another"), folder=tmp_path)


def test_elasticflow_jobs_keep_their_deadlines_and_models(tmp_path: Path, write: Write) -> None:
    trace = write(E, ELASTICFLOW, contexts={"resnet50": "vision"}, context="text", priority=3)
    assert list(read_trace(trace, folder=tmp_path)) == [
        Arrival(0.0, "text", 127, priority=3, deadline_s=975.0),
        Arrival(6.0, "vision", 207, priority=3, deadline_s=1939.0),
        Arrival(6.0, "vision", 207, priority=3, deadline_s=1939.0),
        Arrival(6.0, "text", 1, priority=3, deadline_s=1939.0),
    ]
    trace = write(E, ELASTICFLOW, contexts={"bert": "text"})
    with pytest.raises(ConfigError, match=r"trace: line 3: model_name: 'resnet50' has no context"):
        list(read_trace(trace, folder=tmp_path))


def test_azure_requests_keep_lengths_and_fractions_of_seconds(tmp_path: Path, write: Write) -> None:
    plain = AZURE.encode()
    for data in (plain, gzip.compress(plain), b"\xef\xbb\xbf" + plain):
        assert list(read_trace(write(A, data, deadline_s=Duration(30.0)), folder=tmp_path)) == [
            Arrival(0.0, "llm", 1, 374, deadline_s=30.0, output=44),
            Arrival(4.314579, "llm", 1, 396, deadline_s=30.0, output=109),
        ]


def test_slinfer_functions_are_merged_and_get_contexts_in_turn(tmp_path: Path, write: Write) -> None:
    trace = write(S, json.dumps(SLINFER), context=("a", "b"))
    assert list(read_trace(trace, folder=tmp_path)) == [
        Arrival(2.5, "a", 1, 30, output=3), Arrival(4.0, "b", 1, 10, output=1), Arrival(9.0, "a", 1, 40, output=4),
        Arrival(9.5, "b", 1, 20, output=2),
    ]  # fmt: skip
    named = write(S, json.dumps(SLINFER), contexts={"late": "a", "early": "b"})
    assert Counter(call.context for call in read_trace(named, folder=tmp_path)) == {"a": 2, "b": 2}


def test_plain_table_has_the_fields_of_a_call(tmp_path: Path, write: Write) -> None:
    whole = (
        "deadline_s,at_s,items,context,input_length,expected_output,priority\n"
        "60,1.25,2,llm,300,40,-1\n"
        "\n"
        '0,1.25,3,"llm",0,0,5\n'
    )
    assert list(read_trace(write(C, whole), folder=tmp_path)) == [
        Arrival(1.25, "llm", 2, 300, 40, -1, 60.0), Arrival(1.25, "llm", 3, 0, 0, 5)
    ]  # fmt: skip
    lengths = write(C, "at_s,input_length,output\n0,300,40\n", context="llm", tokens=SOON)
    assert list(read_trace(lengths, folder=tmp_path)) == [
        Arrival(0.0, "llm", 1, 300, output=40, objective=Objective(ttft_s=0.5, tpot_s=0.25))
    ]
    least = write(C, "at_s\r\n0\r\n7.5\r\n", context="llm", items=4)
    assert list(read_trace(least, folder=tmp_path)) == [Arrival(0.0, "llm", 4), Arrival(7.5, "llm", 4)]


def test_part_of_a_trace_is_selected_by_the_times_in_the_trace(tmp_path: Path, write: Write) -> None:
    text = "at_s\n" + "".join(f"{second}\n" for second in range(100))
    part = write(C, text, context="llm", start_s=Duration(10.0), for_s=Duration(20.0), speedup=2.0)
    assert [call.at_s for call in read_trace(part, folder=tmp_path)] == [second / 2 for second in range(20)]
    few = write(C, text, context="llm", count=3)
    assert len(list(read_trace(few, folder=tmp_path))) == 3


def test_trace_is_read_lazily(tmp_path: Path, write: Write) -> None:
    text = "at_s\n" + "".join(f"{second}\n" for second in range(20_000)) + "nonsense\n"
    calls = read_trace(write(C, text, context="llm"), folder=tmp_path)
    assert len(list(islice(calls, 5))) == 5
    with pytest.raises(ConfigError, match=r"line 20002: at_s: 'nonsense' is not a number"):
        list(calls)


@pytest.mark.parametrize(
    ("format", "text", "problem"),
    [
        (P, "", "trace: the file is empty"),
        (P, PHILLY.splitlines()[0], "trace: the file contains no calls"),
        (P, PHILLY.replace("duration", "time", 1), r"line 1: duration: the header lacks this column"),
        (P, PHILLY.replace(",66.0,1", ",-66.0,1"), r"line 2: duration: '-66\.0' is not a number of"),
        (P, PHILLY.replace(",66.0,1", ",0,1"), r"line 2: duration: 0 s is 0 items"),
        (P, PHILLY.replace("2017-10-09 06:13:33", "at noon"), r"line 4: timestamp: 'at noon' is not a"),
        (P, PHILLY.replace(",6214e9", ""), "line 3: has 4 fields where the header has 5"),
        (E, ELASTICFLOW.replace(",5985,", ",5009,"), r"line 2: deadline: 5009 s is not after"),
        (A, AZURE.replace("15:50", "15:40"), r"line 3: TIMESTAMP: the time is 5\.68542"),
        (A, AZURE.replace(",109", ",1_0"), r"line 3: GeneratedTokens: '1_0' is not a whole number"),
        (A, AZURE.encode() + b"\xff,1,1\n", r"line 4: byte 1 \(0xff\) is not UTF-8 text"),
        pytest.param(A, gzip.compress(AZURE.encode())[:-20], "cannot be read", id="half a gzip"),
        (A, AZURE + '"open', r"line 4: is not CSV: unexpected end of data"),
        (C, "at_s,contxt\n0,llm\n", "line 1: contxt: is not a known column; did you mean context?"),
        (C, "at_s,context,at_s\n0,llm,0\n", "line 1: at_s: is in the header twice"),
        (C, "at_s\n0\n", "line 2: context: the header lacks this column"),
        (C, PLAIN.replace("0.5,llm", "nan,llm"), "line 3: at_s: 'nan' is not a number"),
        (C, PLAIN.replace("encoder", "encodr"), "line 4: context: 'encodr' is not a context of this scen"),
        (C, "at_s,context,gang\n0,llm,2\n", "line 1: gang: is not a known column; did you mean gang"),
        (
            C,
            "at_s,context,gang_least,gang_most\n0,llm,3,2\n",
            "line 2: gang_least: '3' is not a whole number from 1 to 2",
        ),
        (C, "at_s,context,fixed_s\n0,llm,-1\n", "line 2: fixed_s: '-1' is not a number of at least 0"),
        (C, "at_s,context,items,items_done\n0,llm,5,6\n", "line 2: items_done: '6' is not a whole number from 0 to 5"),
        (S, '[{"HashFunction": "f",\n"timestamps": [1.0,],', r"trace: line 2: is not JSON"),
        (S, "{}", r"trace: the file: Expected `array`, got `object`"),
        (S, FUNCTION([1.0], '["x"]', [1]), r"\[0\]\.input\[0\]: Expected"),
        (S, FUNCTION([1.0], [], [1]), r"\[0\]: input, output and"),
        (
            S,
            FUNCTION([2.0, 1.5], [1, 1], [1, 1]),
            r"function 0 \(f\): timestamps\[1\]: the time decreases from 2 s to 1\.5 s",
        ),
        (S, FUNCTION([1.0], [-4], [1]), r"input\[0\]: .* not numbers of tokens"),
    ],
)
def test_bad_trace_is_refused_with_its_location(
    tmp_path: Path, write: Write, format: TraceFormat, text: str | bytes, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        list(read_trace(write(format, text), folder=tmp_path, contexts=("llm", "encoder")))
    assert refused.value.file == str(tmp_path / "trace")
    assert str(refused.value).startswith(f"{tmp_path / 'trace'}: ")


def test_plain_table_names_gang_sizes_and_deadlines(tmp_path: Path, write: Write) -> None:
    text = "at_s,items,gang_least,gang_most,fixed_s,items_done\n0,90,2,8,12.5,40\n1,90,1,1,0,0\n"
    assert list(read_trace(write(C, text, context="llm"), folder=tmp_path)) == [
        Arrival(0.0, "llm", 90, gang=(2, 8), fixed_s=12.5, items_done=40), Arrival(1.0, "llm", 90),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "gangs"),
    [
        ("at_s\n0\n", [(2, 4)]),
        ("at_s,gang_most\n0,8\n0,1\n", [(2, 8), (1, 1)]),
        ("at_s,gang_least\n0,3\n0,6\n", [(3, 4), (6, 6)]),
    ],
)
def test_gang_settings_missing_in_a_table_come_from_the_scenario(
    tmp_path: Path, write: Write, text: str, gangs: list[tuple[int, int]]
) -> None:
    calls = read_trace(write(C, text, context="llm", gang=(2, 4)), folder=tmp_path)
    assert [call.gang for call in calls] == gangs


def test_trace_errors_name_the_file_by_its_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "day").mkdir()
    (tmp_path / "day" / "bad.csv").write_text("at_s\n5\n4\n")
    for file, said in (("bad.csv", r"^day/bad\.csv: line 3: at_s: "), ("../away.csv", r"^day/\.\./away\.csv: no such")):
        with pytest.raises(ConfigError, match=said) as caught:
            list(read_trace(Trace(format=C, file=file, context="llm"), folder=tmp_path / "day"))
        assert caught.value.file == str(tmp_path / "day" / file)
