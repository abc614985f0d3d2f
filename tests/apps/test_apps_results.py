import json
import math
import random
from pathlib import Path

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.apps.fact_verification import results
from stoker.apps.fact_verification.functions import Question, Scores, verify
from stoker.apps.fact_verification.options import LABELS, Claim, PromptTemplate
from stoker.apps.fact_verification.results import (
    KEY,
    choose_calibrated_labels,
    compare_prompts,
    compute_prompt_figures,
    count_confusions,
    find_best_prompt,
    make_log_records,
    make_result_rows,
    mcnemar_p_value,
    wilson_interval,
    write_results,
    write_timeline,
)
from stoker.apps.fact_verification.run import name_failed_claims, plan_missing_calls
from stoker.errors import StokerError
from stoker.protocol.status import ContextStatus, DeviceStatus, LibraryStatus, PilotStatus
from stoker.protocol.to_client import Status
from stoker.run_folder import RecordLog
from stoker.sessions import ContextFacts, context_facts

GOOD, BAD = PromptTemplate(name="good", text="g {claim}"), PromptTemplate(name="bad", text="b {claim}")
CLAIMS = [
    Claim(id=str(n), claim=f"claim {n}", label=LABELS[n % 3], evidence="", place=f"line {n + 1}") for n in range(30)
]


def scores(prompt, claims, *, number=0):
    """Return scores: the good prompt errs in every tenth claim, the bad prompt always gives one answer. Both prompts
    give REFUTES five nats too much.
    """
    rows = []
    for claim in claims:
        row = [-9.0, -4.0, -9.0]
        if prompt is GOOD:
            row[LABELS.index(claim.label) if int(claim.id) % 10 else 0] += 3.0
        else:
            row[0] += int(claim.id) / 100
        rows.append(row)
    return Scores(number=number, rows=rows, started_at=100.0 + number, infer_s=0.5 * len(claims), worker="n1:1")


@pytest.fixture
def log(tmp_path):
    with RecordLog(tmp_path / "log", key=KEY) as log:
        for number, call in enumerate(plan_missing_calls([GOOD, BAD], CLAIMS, log, batch_size=8)):
            log.append(make_log_records(*call, scores(*call, number=number)))
        yield log


def test_plan_contains_only_claims_without_a_result(tmp_path):
    with RecordLog(tmp_path / "log", key=KEY) as log:
        calls = plan_missing_calls([GOOD, BAD], CLAIMS, log, batch_size=8)
        assert [(prompt.name, len(claims)) for prompt, claims in calls] == [
            ("good", 8), ("good", 8), ("good", 8), ("good", 6), ("bad", 8), ("bad", 8), ("bad", 8), ("bad", 6),
        ]  # fmt: skip
        for call in (calls[1], calls[6]):
            log.append(make_log_records(*call, scores(*call)))
        left = plan_missing_calls([GOOD, BAD], CLAIMS, log, batch_size=8)
        asked = [(prompt.name, claim.id) for prompt, claims in left for claim in claims]
        there = [
            (prompt.name, claim.id) for prompt in (GOOD, BAD) for claim in CLAIMS if (prompt.digest, claim.id) in log
        ]
        assert len(asked) == 44
        assert sorted([*asked, *there]) == sorted((name, claim.id) for name in ("good", "bad") for claim in CLAIMS)


def test_result_rows_keep_claim_order_for_any_order_of_calls(tmp_path, log):
    rows = make_result_rows([GOOD, BAD], CLAIMS, log, calibrate=True)
    with RecordLog(tmp_path / "other", key=KEY) as other:
        for number, call in reversed(list(enumerate(plan_missing_calls([GOOD, BAD], CLAIMS, other, batch_size=8)))):
            other.append(make_log_records(*call, scores(*call, number=number)))
        assert make_result_rows([GOOD, BAD], CLAIMS, other, calibrate=True) == rows
    assert [(row.prompt, row.claim_id) for row in rows] == [(p, c.id) for p in ("good", "bad") for c in CLAIMS]


def test_accuracy_is_computed_with_and_without_calibration(log):
    good, bad = compute_prompt_figures(make_result_rows([GOOD, BAD], CLAIMS, log, calibrate=True))
    # With calibration, the answer to claims 0, 10 and 20 is SUPPORTS, which is right for claim 0 only. Without
    # calibration, every answer is REFUTES.
    assert (good.right, good.raw_right) == (28, 10)
    assert good.matrix == [[10, 0, 0], [1, 9, 0], [1, 0, 9]]
    assert good.recall_by_label == [1.0, 0.9, 0.9]
    assert good.low < 28 / 30 < good.high
    assert good.claims_per_second == pytest.approx(2.0)
    assert bad.raw_right == 10
    raw_good, raw_bad = compute_prompt_figures(make_result_rows([GOOD, BAD], CLAIMS, log, calibrate=False))
    assert (raw_good.right, raw_bad.right) == (10, 10)
    assert find_best_prompt([bad, good]) is good


def test_missing_result_raises_an_error(tmp_path):
    with RecordLog(tmp_path / "log", key=KEY) as log:
        log.append(make_log_records(GOOD, CLAIMS[:29], scores(GOOD, CLAIMS[:29])))
        with pytest.raises(StokerError, match="no result for claim 29 with good"):
            make_result_rows([GOOD], CLAIMS, log, calibrate=True)


def test_parquet_and_jsonl_result_files_have_equal_rows(tmp_path, log):
    rows = make_result_rows([GOOD, BAD], CLAIMS, log, calibrate=True)
    write_results(rows, tmp_path / "a.parquet", kind="parquet")
    write_results(rows, tmp_path / "a.jsonl", kind="jsonl")
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert table == [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(table) == 60
    assert table[0]["prompt"] == "good"
    assert table[0]["correct"] is True


def test_timeline_has_a_bar_for_each_call(tmp_path, log):
    write_timeline(make_result_rows([GOOD, BAD], CLAIMS, log, calibrate=True), tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    assert [bar["args"]["claims"] for bar in bars] == [8, 8, 8, 6] * 2
    assert bars[0]["dur"] == 4_000_000
    assert [bar["ts"] for bar in bars] == [(100 + number) * 1_000_000 for number in range(8)]


def attempt(**more):
    facts = ContextFacts(hot=2, pilots=1, devices=2, loads=2, load_total_s=0.8, calls=8)
    return results.RunAttempt(
        **{"wall_s": 15.0, "made": 60, "kept": 0, "calls": 8, "infer_s": 30.0, "facts": facts, **more}
    )


def test_report_shows_accuracy_significance_and_cost(log):
    rows = make_result_rows([GOOD, BAD], CLAIMS, log, calibrate=True)
    made = compute_prompt_figures(rows)
    _, head, good, bad = results.format_results_table(made)
    assert len(head) >= len(bad)
    assert "93.3 %  (78.7-98.2)" in good
    assert good.endswith("   best")
    # Each column is aligned with its header.
    for name, share in zip(results.SHORT, ("100.0", "90.0", "90.0"), strict=True):
        assert good[: head.index(name) + len(name)].endswith(share)
    verdict = "\n".join(results.format_verdict(rows, made, calibrated=True))
    assert "ahead of bad by more than chance (McNemar p < 0.001)" in verdict
    assert "constant answer" not in verdict
    assert "uncalibrated 33.3, 33.3 %" in verdict
    cost = "\n".join(results.format_cost(attempt()))
    assert "60 inferences in 15 s, 4.0/s on 2 devices" in cost
    assert "30 s inferring, 0.8 s loading (2 loads, 6 calls found it hot)" in cost
    assert "if each of the 8 calls had loaded its context, the loads would have taken 3.2 s of device time" in cost
    tables = results.format_confusion_tables(made)
    assert len(tables) == 8
    assert tables[2].split()[-3:] == ["1", "9", "0"]


def test_report_names_differences_within_chance(log):
    rows = make_result_rows([GOOD, BAD], CLAIMS, log, calibrate=False)
    verdict = "\n".join(results.format_verdict(rows, compute_prompt_figures(rows), calibrated=False))
    assert "but bad has as many right answers" in verdict
    assert "not shown to be better than the constant answer SUPPORTS (33.3 %)" in verdict
    assert "this small model" not in verdict
    assert "this small model" in "\n".join(
        results.format_verdict(rows, compute_prompt_figures(rows), calibrated=False, demo=True)
    )
    assert "calibrated" not in verdict
    calibrated = make_result_rows([GOOD, BAD], CLAIMS, log, calibrate=True)
    assert compare_prompts(calibrated, "good", "bad") < 0.001


def test_verification_call_returns_label_scores_and_its_run_time():
    class Toy:
        origin = "a toy"

        def label_scores(self, prompts, labels, *, batch_size=1, prefix=""):
            if "" in labels:
                raise ValueError("prompt 1 has 9000 tokens")
            prompts = [prefix + prompt for prompt in prompts]
            return [[float(len(prompt) + len(label) + batch_size) for label in labels] for prompt in prompts]

    made = verify.function(Toy(), Question(number=7, prefix="p", texts=("", "b"), words=(" x", " yy"), tensor_batch=3))
    assert made.number == 7
    assert made.rows == [[6.0, 7.0], [7.0, 8.0]]
    assert made.infer_s >= 0.0
    assert made.worker
    assert made.origin == "a toy"
    with pytest.raises(StokerError) as caught:
        verify.function(Toy(), Question(number=1, prefix="p", texts=("a", "b"), words=("",)))
    calls = [(GOOD, ()), (GOOD, tuple(CLAIMS[3:5]))]
    told = name_failed_claims(caught.value, calls, file=Path("c.csv"))
    assert str(told) == "c.csv: line 4: claims 3 to 4 (2) with the template good: prompt 1 has 9000 tokens"
    other = StokerError("the session is over")
    assert name_failed_claims(other, calls, file=Path("c.csv")) is other


def test_context_facts_include_only_the_named_contexts():
    def one(key, **more):
        facts = {"hot": 0, "loading": 0, "queued": 0, "running": 0, "loads": 0, "ended": 0, "load_s": 0.0}
        zero = {"load_total_s": 0.0, "run_s": 0.0, "run_total_s": 0.0, "memory_bytes": 0, "waits_for": ""}
        return ContextStatus(key=key, name=f"llm-{key}", **{**facts, **zero, **more})

    devices = tuple(DeviceStatus(f"cpu:{n}", "cpu", 1, 0, ()) for n in range(2))
    pilots = (
        PilotStatus("p1", "h", "b", "here", devices, "/", 0, 0.0, 0.0),
        PilotStatus("p0", "h", "b", "gone", devices, "/", 0, 0.0, 0.0),
    )
    libraries = (
        LibraryStatus(1, "llm-a", "loading", "", "p1", ("cpu:1",), 0, 0, 0, 0),
        LibraryStatus(2, "llm-b", "loading", "", "p1", ("cpu:0",), 0, 0, 0, 0),
    )
    contexts = (one("a", hot=1, loading=1, loads=1, load_total_s=0.4, ended=7, served=5), one("b", loading=1, loads=9))
    status = Status("s", 1.0, 0, 0, 0, 0, 0.0, 0.0, pilots, libraries, contexts, {}, 0, 0, {})
    facts = context_facts(status, keys={"a"})
    assert (facts.names, facts.hot, facts.loading, facts.loading_on) == (("llm-a",), 1, 1, ("cpu:1",))
    assert (facts.pilots, facts.devices, facts.loads, facts.load_s, facts.found_hot) == (1, 2, 1, 0.4, 4)
    assert context_facts(status, keys=()).loads == 0


# ---- statistics


# Expected intervals from R's prop.test(right, total, correct = FALSE) and from Newcombe (1998), table I.
@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_intervals(right, total, low, high):
    assert wilson_interval(right, total) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@given(st.integers(0, 500), st.integers(1, 500))
def test_wilson_interval_contains_the_share_and_is_symmetric(right, total):
    right = min(right, total)
    low, high = wilson_interval(right, total)
    assert 0.0 <= low <= right / total <= high <= 1.0
    mirrored = wilson_interval(total - right, total)
    assert mirrored == (pytest.approx(1 - high, abs=1e-12), pytest.approx(1 - low, abs=1e-12))


def test_mcnemar_gives_known_values():
    # 1 of 10 discordant pairs favours the second: p = 2 * (1 + 10) / 2**10.
    first = [True] * 9 + [False] + [True] * 30
    second = [False] * 9 + [True] + [True] * 30
    assert mcnemar_p_value(first, second) == pytest.approx(22 / 1024)
    assert mcnemar_p_value(first, first) == 1.0
    assert mcnemar_p_value([True, False], [False, True]) == 1.0
    assert mcnemar_p_value([True] * 3000, [False] * 3000) == 0.0, "no overflow"


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_p_value_is_twice_the_binomial_tail(more, fewer):
    total = more + fewer
    tail = sum(math.comb(total, count) for count in range(min(more, fewer) + 1))
    p = mcnemar_p_value([True] * more + [False] * fewer, [False] * more + [True] * fewer)
    assert p == pytest.approx(min(1.0, 2 * tail / 2**total))


def test_confusion_counts_truth_by_answer():
    assert count_confusions([0, 0, 1, 2], [0, 1, 1, 0], labels=3) == [[1, 1, 0], [0, 1, 0], [1, 0, 0]]


def test_calibration_removes_the_bias_for_a_label():
    chance = random.Random(1)
    truth = [chance.randrange(3) for _ in range(300)]
    # The scores favour the true label, but give the second label five nats too many.
    scores = [[(2.0 if label == true else 0.0) + (5.0 if label == 1 else 0.0) for label in range(3)] for true in truth]
    assert {row.index(max(row)) for row in scores} == {1}
    assert choose_calibrated_labels(scores) == truth


def test_calibration_ignores_the_likelihood_common_to_a_row():
    scores = [[-1.0, -2.0, -3.0], [-3.0, -1.0, -2.0], [-2.0, -3.0, -1.0]]
    shifted = [[score - 100.0 * row for score in one] for row, one in enumerate(scores)]
    assert choose_calibrated_labels(shifted) == choose_calibrated_labels(scores) == [0, 1, 2]
    assert choose_calibrated_labels([]) == []
