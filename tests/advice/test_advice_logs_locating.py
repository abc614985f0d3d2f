from __future__ import annotations

from pathlib import Path

import pytest

from stoker.manager.advice.logs import locate_failure

GOOD = [f"step {step} loss {1 / (step + 1):.4f} val_error=0.{step} tokens/s {step * 3.1:.1f}" for step in range(300)]
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/home/ada/train.py", line 9, in <module>',
    "    main()",
    '  File "/home/ada/train.py", line 4, in main',
    '    raise KeyError("label")',
    "KeyError: 'label'",
]
CHAINED = [
    *TRACEBACK,
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    *TRACEBACK[:4],
    '    raise ValueError("bad sample")',
    "ValueError: bad sample",
]


def lost(rank: int) -> list[str]:
    lines = [
        "Traceback (most recent call last):",
        '  File "/home/ada/train.py", line 13, in <module>',
        "    dist.all_reduce(flat)",
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:21380",
    ]
    return [f"[rank{rank}]: {line}" for line in lines]


@pytest.mark.parametrize("source", ["", [], b"", GOOD, "\n".join(GOOD), [b"\xff\xfe\x00"]])
def test_log_without_a_failure_shows_nothing(source: str | bytes | list[str]):
    assert locate_failure(source) is None


def test_whole_chain_of_tracebacks_is_shown():
    found = locate_failure([*GOOD, *CHAINED])
    assert found.first.number == len(GOOD) + 1
    assert [line.text for line in found.traceback] == CHAINED
    assert [line.text for line in found.error_lines] == ["KeyError: 'label'", "ValueError: bad sample"]
    assert [line.number for line in found.before] == list(range(261, 301))


def test_cause_is_found_among_thousands_of_lines_of_other_ranks():
    early, late = lost(7), [line for rank in range(8, 508) for line in lost(rank)]
    found = locate_failure([*GOOD, *early, *TRACEBACK, *late])
    assert found.first.number == len(GOOD) + len(early) + 1
    assert found.traceback[-1].text == "KeyError: 'label'"


def test_error_of_a_single_rank_is_the_cause_of_errors_on_other_ranks():
    others = [f"[rank{rank}]: gather: lost its neighbour, failed" for rank in range(40)]
    cause = "[rank7]: gather: cannot map the window"
    found = locate_failure([*GOOD, *others[:2], cause, *others[2:]], rules=())
    assert found.first.text == cause


def test_error_shared_by_all_ranks_is_the_cause_if_no_other_exists():
    found = locate_failure([*GOOD, *[f"[rank{rank}]: gather: failed" for rank in range(40)]], rules=())
    assert found.first.text == "[rank0]: gather: failed"


def test_traceback_is_assembled_from_interleaved_lines_of_30_ranks():
    texts = [*TRACEBACK[:-1], "KeyError: 'rank {rank}'"]
    lines = [f"[rank{rank}]: {text.format(rank=rank)}" for text in texts for rank in range(30)]
    found = locate_failure([*GOOD, *lines])
    assert [line.text for line in found.traceback] == [f"[rank0]: {text.format(rank=0)}" for text in texts]


def test_recovered_failure_is_not_reported_as_the_cause():
    overcome = [*TRACEBACK[:5], "ConnectionError: reset", "upload failed, retrying in 10 s"]
    found = locate_failure([*GOOD, *overcome, *GOOD[:20], *TRACEBACK])
    assert found.first.number == len(GOOD) + len(overcome) + 20 + 1
    assert locate_failure([*GOOD, *overcome, *GOOD]) is None


def test_missing_log_file_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        locate_failure(tmp_path / "none")
