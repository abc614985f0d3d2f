import json

import pytest

from stoker.apps.batch_inference.functions import BatchAnswer
from stoker.apps.batch_inference.options import ModelPaths
from stoker.apps.batch_inference.request_file import check_file
from stoker.apps.batch_inference.results import (
    KEY,
    count_totals,
    make_call_failed_error,
    make_error_lines,
    make_log_record,
    write_responses,
)
from stoker.apps.batch_inference.run import convert_error_unless_fatal
from stoker.apps.common.batch_state import write_lines
from stoker.apps.common.openai_answers import Choice
from stoker.apps.common.openai_requests import ApiError, Endpoint
from stoker.errors import CallTimeoutError, ContextError, PoisonCallError, SessionError
from stoker.run_folder import RecordLog


def answer(custom_id, line, *, error=None, text="…", endpoint=Endpoint.CHAT):
    choices = [] if error else [Choice(text, "stop", prompt_tokens=3, completion_tokens=2)]
    return BatchAnswer(custom_id, line, endpoint, "m", choices, error, ended_at=1700000000.7, infer_s=0.5)


@pytest.fixture
def checked(tmp_path):
    body = {"model": "m", "prompt": "x"}
    lines = [{"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} for name in "abcd"]
    lines.insert(1, {"custom_id": "wrong", "method": "GET", "url": "/v1/completions", "body": body})
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return check_file(tmp_path / "r.jsonl", admit=ModelPaths({}, "m").check_model)


@pytest.fixture
def log(tmp_path, checked):
    """Yield a log with answers to a and c, out of order, and the model's error for b."""
    with RecordLog(tmp_path / "log", key=KEY) as log:
        for one in (answer("c", 4, text="é"), answer("b", 3, error=ApiError("too long")), answer("a", 1)):
            log.append([make_log_record(one, digest=checked.digest)])
        yield log


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_and_errors_come_in_the_order_of_the_requests(tmp_path, checked, log):
    totals, failed = count_totals(log), {"d": ApiError("line 5: lost", status=500)}
    assert (totals.answered, totals.prompt_tokens, totals.completion_tokens, totals.refused) == (2, 6, 4, {"b"})
    write_responses(tmp_path / "out", checked, log, totals)
    lines = make_error_lines(checked, log, totals, failed)
    write_lines(tmp_path / "err", lines)
    assert [line["custom_id"] for line in read(tmp_path / "out")] == ["a", "c"]
    assert [line["custom_id"] for line in read(tmp_path / "err")] == ["wrong", "b", "d"]
    assert [line["response"]["status_code"] for line in read(tmp_path / "err")] == [400, 400, 500]
    messages = [line["response"]["body"]["error"]["message"] for line in lines]
    assert messages[:2] == ["line 2: method must be POST", "too long"]


def test_no_character_of_an_answer_breaks_its_output_line(tmp_path, checked):
    text = "".join(map(chr, [*range(1, 0x20), 0x85, 0x2028, 0x2029, 0x1F600]))
    with RecordLog(tmp_path / "odd", key=KEY) as log:
        log.append([make_log_record(answer("a", 1, text=text), digest=checked.digest)])
        write_responses(tmp_path / "out", checked, log, count_totals(log))
    (line,) = read(tmp_path / "out")
    assert line["response"]["body"]["choices"][0]["message"]["content"] == text


def test_response_line_has_the_openai_format_and_is_reproducible(checked):
    line = make_log_record(answer("a", 1), digest=checked.digest)["line"]
    assert line == make_log_record(answer("a", 1), digest=checked.digest)["line"]
    assert list(line) == ["id", "custom_id", "response", "error"]
    assert line["id"].startswith("batch_req_")
    assert line["error"] is None
    body = line["response"]["body"]
    assert body.pop("id").startswith("chatcmpl-")
    message = {"role": "assistant", "content": "…", "refusal": None}
    assert body == {
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        "system_fingerprint": None,
    }


@pytest.mark.parametrize("error", [KeyError("x"), PoisonCallError("it killed three"), CallTimeoutError("too slow")])
def test_failed_call_is_the_error_of_its_request(error):
    found = convert_error_unless_fatal(error, line=7)
    assert found == make_call_failed_error(error, line=7)
    assert (found.status, found.type, found.code) == (500, "server_error", "call_failed")
    assert found.message.startswith("line 7: ")


@pytest.mark.parametrize("error", [ContextError("no model"), SessionError("it is over")])
def test_error_that_affects_all_requests_ends_the_run(error):
    with pytest.raises(type(error)):
        convert_error_unless_fatal(error, line=7)
