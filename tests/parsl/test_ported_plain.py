from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import parsl
import psutil
import pytest
from parsl import bash_app, python_app
from parsl.app.errors import BashExitFailure
from parsl.config import Config

import stoker
from stoker import StokerExecutor
from stoker.manager.advice.logs import FaultKind
from stoker.manager.cli import explain
from stoker.manager.cli.session_choice import find_story_of_subject
from stoker.protocol.to_client import Story


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StokerExecutor]:
    executor = StokerExecutor()
    parsl.load(Config(executors=[executor], initialize_logging=False, run_dir=str(tmp_path_factory.mktemp("runs"))))
    yield executor
    parsl.dfk().cleanup()
    parsl.clear()


@pytest.mark.usefixtures("executor")
def test_memoization_ignores_the_arguments_in_ignore_for_cache() -> None:
    @stoker.app(cache=True, ignore_for_cache=["label"])
    def who(number: int, label: str = "") -> tuple[int, str]:
        return number, label

    assert who(1, label="a").result(60) == (1, "a")
    assert who(1, label="b").result(60) == (1, "a"), "the result is known already"
    assert who(2, label="b").result(60) == (2, "b")


def explained(executor: StokerExecutor, future: Any) -> tuple[Story, explain.FailureVerdict]:
    folder, story, _ = find_story_of_subject(
        str(executor.folder.path), future.task_record["exec_fu"].parsl_executor_task_id
    )
    fault = explain.diagnose_story_failure(folder, story)
    assert fault is not None
    return story, fault


def bad(number: int) -> int:
    raise ValueError(f"no {number}")


def walled(number: int, walltime: float = 30.0) -> int:
    raise ValueError(number)


@pytest.mark.parametrize("function", [bad, walled])
def test_exception_in_a_wrapped_parsl_app_is_explained_as_the_users(
    executor: Any, function: Callable[[int], int]
) -> None:
    future = python_app(function)(1)
    with pytest.raises(ValueError, match="1"):
        future.result(60)
    story, fault = explained(executor, future)
    assert f"at {__file__}:" in "".join(line.text for line in story.lines)
    assert (fault.kind, fault.component) == (FaultKind.USER, "code")
    assert fault.sure >= 0.5


@pytest.mark.parametrize("where", ["the log", "a file"])
def test_failed_command_shows_its_command_line_and_last_lines(executor: Any, tmp_path: Path, where: str) -> None:
    @bash_app
    def talks(word: str, stderr: str | None = None) -> str:
        return f"echo not this; echo {word}"

    @bash_app
    def fails(word: str, stderr: str | None = None) -> str:
        return f"echo {word} >&2; exit 3"

    assert talks("of another call").result(60) == 0
    future = fails("oh no", stderr=str(tmp_path / "said.err") if where == "a file" else None)
    with pytest.raises(BashExitFailure) as caught:
        future.result(60)
    error = caught.value
    assert (error.app_name, error.exitcode) == ("fails", 3)
    assert str(error).splitlines() == [
        "bash_app fails failed with unix exit code 3: echo oh no >&2; exit 3",
        "its last lines:",
        "  oh no",
    ]
    assert repr(error) == "BashExitFailure('fails', 3)"
    story, fault = explained(executor, future)
    assert ".fails  " in story.headline
    assert (fault.kind, fault.component) == (FaultKind.USER, "command")
    assert not any("bash.py" in line.text for line in fault.proof)


def test_command_lines_and_environments_contain_no_secrets(executor: Any) -> None:
    @python_app
    def ancestors() -> list[int]:
        import psutil

        return [process.pid for process in psutil.Process().parents()]

    ours = [psutil.Process(pid) for pid in ancestors().result(60)]
    [pilot] = [each for each in ours if {"stoker.pilot.main", "--block"} <= set(each.cmdline())]
    keys = [executor.folder.read_key(role) for role in ("server", "client", "transfer")]
    secrets = [key.secret for key in (*keys, executor.folder.read_block_key("0"))]
    for process in (pilot, psutil.Process(executor._manager.pid)):
        seen = " ".join([*process.cmdline(), *process.environ().values()])
        assert not any(secret in seen for secret in secrets)
