"""A language model explains log formats that the rules cannot read; only numbers in the line are used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from advice.fake_endpoint import FakeEndpoint

from stoker.manager.advice.endpoint import ModelEndpoint
from stoker.manager.advice.metrics import FollowedLog, LineFormats, LoggedProgress, read_metrics
from stoker.site import Advice

pytest.importorskip("httpx", reason="the endpoint is asked through httpx")

LINE = "trained {step}/4000: penalty {loss:.3f}, 250ms each, rate {rate:.2e}"
ANSWER = {"step": "{step}", "total_steps": "4000", "loss": "{loss:.3f}", "seconds_per_step": "250"}


def report(step: int) -> str:
    return LINE.format(step=step, loss=900 / (step + 1), rate=1e-3 / step)


def answers(**metrics: str) -> Callable[[dict[str, Any], int], str]:
    """Return a model that answers with the named parts of the received line."""

    def answer(request: dict[str, Any], number: int) -> str:
        line = request["messages"][-1]["content"]
        step = int(line.split("/")[0].rpartition(" ")[2])
        return json.dumps({name: text.format(step=step, loss=900 / (step + 1)) for name, text in metrics.items()})

    return answer


def model(endpoint: FakeEndpoint, **settings: Any) -> ModelEndpoint:
    return ModelEndpoint(Advice(**{"url": endpoint.url, "model": "fake", "time_limit_s": 5.0, **settings}))


def tracked(path: Path, formats: LineFormats, asking: ModelEndpoint, *, looks: int = 1) -> LoggedProgress | None:
    log = FollowedLog(path, formats=formats)
    for _ in range(looks):
        log.track(at_s=0.0)
        formats.learn_formats(formats.take_unread_formats(), asking)
    return log.track(at_s=0.0)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.log"
    path.write_text("".join(f"{report(step)}\n" for step in range(100, 140)))
    assert read_metrics(report(100)) is None, "these tests need a line that the rules cannot read"
    return path


def test_numbers_named_by_a_learned_format_are_read_from_all_lines(endpoint: FakeEndpoint, log: Path):
    endpoint.answer = answers(**ANSWER)
    found = tracked(log, LineFormats(), model(endpoint))
    assert found is not None
    assert (found.step, found.total, found.unit) == (139.0, 4000.0, "step")
    assert found.loss == pytest.approx(900 / 140, abs=1e-3)
    assert found.steps_per_s == pytest.approx(4.0), "the line gives milliseconds"
    assert found.seconds_left == pytest.approx(3861 / 4)


def test_log_format_is_requested_once_and_kept_for_later_runs(endpoint: FakeEndpoint, log: Path, tmp_path: Path):
    endpoint.answer = answers(**ANSWER)
    kept = tmp_path / "sources.sqlite"
    first = tracked(log, LineFormats(kept), model(endpoint), looks=3)
    later = tracked(log, LineFormats(kept), model(endpoint))
    assert first == later
    assert len(endpoint.asked) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "77777", "loss": "0.123"},  # this number is in no line
        {"step": "4000"},  # this number is equal in all lines
        {"step": "{loss:.3f}"},  # a step must be a whole number
        {"total_steps": "4000"},  # a total is useless without the count of finished steps
        {"step": "{step}", "epoch": "{step}"},  # a number cannot be both a step and an epoch
        {"weather": "{step}"},
        {"step": ["{step}"]},
    ],
)
def test_language_model_answer_that_contradicts_the_log_is_ignored(
    endpoint: FakeEndpoint, log: Path, wrong: dict[str, Any]
):
    if isinstance(wrong.get("step"), list):
        endpoint.answer = lambda request, number: json.dumps(wrong)
    else:
        endpoint.answer = answers(**wrong)
    formats = LineFormats()
    assert tracked(log, formats, model(endpoint), looks=3) is None
    assert len(endpoint.asked) == 1, "a format without a metric is kept too"


def test_spent_session_budget_stops_questions_to_the_model(endpoint: FakeEndpoint, log: Path, tmp_path: Path):
    endpoint.answer, endpoint.tokens = answers(**ANSWER), 5_000
    asking = model(endpoint, session_tokens=5_000)
    assert tracked(log, LineFormats(), asking) is not None
    other = tmp_path / "other.log"
    other.write_text(log.read_text().replace("penalty", "regret"))
    assert tracked(other, LineFormats(), asking) is None
    assert len(endpoint.asked) == 1


def test_secret_in_a_line_is_neither_sent_nor_stored(endpoint: FakeEndpoint, log: Path, tmp_path: Path):
    log.write_text(log.read_text().replace("penalty", "token=hf_abcdefgh1234567890 penalty"))
    endpoint.answer = answers(**ANSWER)
    kept = tmp_path / "sources.sqlite"
    found = tracked(log, LineFormats(kept), model(endpoint))
    assert found is not None
    assert found.step == 139.0
    assert "abcdefgh1234567890" not in json.dumps(endpoint.asked)
    assert not any(b"abcdefgh" in file.read_bytes() for file in tmp_path.glob("sources.sqlite*"))


def test_built_in_rules_take_precedence_over_learned_formats(endpoint: FakeEndpoint, log: Path):
    endpoint.answer = answers(step="{step}", loss="{loss:.3f}")
    with log.open("a") as file:
        file.write("".join(f"step {step}/500\n" for step in range(20, 40)))
    found = tracked(log, LineFormats(), model(endpoint))
    assert found is not None
    assert (found.step, found.total) == (39.0, 500.0)


def test_one_log_read_requests_at_most_four_formats_from_the_model(endpoint: FakeEndpoint, tmp_path: Path):
    path = tmp_path / "run.log"
    path.write_text("".join(f"{report(100 + at)} {letter}\n" for letter in "abcdefghij" for at in range(5)))
    endpoint.answer = answers()
    tracked(path, LineFormats(), model(endpoint))
    assert len(endpoint.asked) == 4


def test_log_format_does_not_depend_on_padding_or_bar_width(endpoint: FakeEndpoint, tmp_path: Path):
    path = tmp_path / "run.log"
    lines = (f"trained [{step:>4}] {'█' * (step // 10)}{'▏▍▊'[step % 3]} penalty" for step in range(95, 115))
    path.write_text("\n".join(lines) + "\n")
    endpoint.answer = lambda request, number: json.dumps(
        {"step": request["messages"][-1]["content"][8:14].strip("[ ]")}
    )
    found = tracked(path, LineFormats(rules=lambda _: None), model(endpoint))
    assert found is None, "the line does not look like progress"
    path.write_text(path.read_text().replace("penalty", "loss"))
    found = tracked(path, LineFormats(rules=lambda _: None), model(endpoint))
    assert found is not None
    assert found.step == 114.0
    assert len(endpoint.asked) == 1
