"""Run a notebook in a real kernel: progress bars, source lines, `await`, changed helpers."""

from __future__ import annotations

import os
import queue
import re
from typing import Any

import pytest

client = pytest.importorskip("jupyter_client", reason="ipykernel is not installed: pip install ipykernel")
pytest.importorskip("ipykernel")


class Cell:
    """The output text, displays by id, and error of a notebook cell."""

    def __init__(self) -> None:
        self.text = ""
        self.shown: list[tuple[str, str, str]] = []
        """Tuples (`display_data` or `update_display_data`, display id, text) in order."""
        self.error = ""


class Notebook:
    def __init__(self, folder: str, home: str) -> None:
        self._manager = client.KernelManager(kernel_name="python3")
        self._manager.start_kernel(cwd=folder, env={**os.environ, "STOKER_HOME": home})
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def run(self, source: str, *, limit_s: float = 90.0) -> Cell:
        cell, asked = Cell(), self._client.execute(source)
        while True:
            try:
                message: dict[str, Any] = self._client.get_iopub_msg(timeout=limit_s)
            except queue.Empty:
                raise AssertionError(f"the cell did not end within {limit_s} s; it said:\n{cell.text}") from None
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                cell.text += content["text"]
            elif kind in ("display_data", "update_display_data"):
                cell.shown.append((kind, content["transient"].get("display_id", ""), content["data"]["text/plain"]))
            elif kind == "execute_result":
                cell.text += content["data"]["text/plain"]
            elif kind == "error":
                cell.error = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return cell

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=False)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory, own_home):
    folder = tmp_path_factory.mktemp("notebook")
    notebook = Notebook(str(folder), str(own_home))
    try:
        begun = notebook.run("import stoker\nsession = stoker.load(run_dir='runs')")
        assert not begun.error, begun.error
        yield notebook
        ended = notebook.run("session.stop()\nprint(repr(session))")
        assert ended.text.endswith("stopped>\n"), ended.error
    finally:
        notebook.close()


def test_traceback_shows_the_lines_of_notebook_cells(notebook):
    notebook.run("def label_of(text):\n    labels = {'yes': 1}\n    return labels[text]  # this line is wanted\n")
    failed = notebook.run(
        "@stoker.app()\ndef judge(text):\n    return label_of(text)  # and this\n\njudge('MAYBE').result()"
    )
    assert "KeyError" in failed.error
    remote = failed.error[failed.error.index("in the library") :].split("The above exception")[0]
    assert "return labels[text]  # this line is wanted" in remote
    assert "return label_of(text)  # and this" in remote
    local = failed.error.split("The above exception")[1]
    assert "Cell In" in local
    assert "stoker/manager" not in local


def test_option_error_shows_only_the_notebook_cell(notebook):
    failed = notebook.run("stoker.map(3, [1])")
    assert "ConfigError" in failed.error or "SpecificationError" in failed.error, failed.error
    assert "stoker.map(3, [1])" in failed.error
    assert "manager/executor" not in failed.error


def test_loader_error_shows_its_line_in_the_notebook_cell(notebook):
    failed = notebook.run(
        "@stoker.context\ndef broken(path):\n    return open(path).read()  # the line of the loader\n\n"
        "@stoker.app(context=broken('/no/such/file'))\ndef use(text):\n    return text\n\nuse().result()"
    )
    assert "ContextError" in failed.error
    assert "return open(path).read()  # the line of the loader" in failed.error


def test_call_is_awaited_in_a_notebook(notebook):
    assert notebook.run("@stoker.app()\ndef double(x):\n    return 2 * x\n\nawait double(21)").text == "42"


def test_changed_helper_of_a_notebook_is_used(notebook):
    notebook.run("def weight():\n    return 1\n\n@stoker.app()\ndef weigh(x):\n    return x * weight()\n")
    assert notebook.run("weigh(10).result()").text == "10"
    notebook.run("def weight():\n    return 3\n")
    assert notebook.run("weigh(10).result()").text == "30"
    notebook.run("@stoker.app()\ndef weigh(x):\n    return -x * weight()\n")
    assert notebook.run("weigh(10).result()").text == "-30", "the app of a cell that ran again"


def test_progress_bar_of_a_notebook_stays_in_one_place(notebook):
    cell = notebook.run(
        "import time\n"
        "results = list(stoker.map(lambda x: time.sleep(0.2) or x, range(12), progress=True))\n"
        "len(results)"
    )
    assert cell.text == "12"
    kinds = [kind for kind, _, _ in cell.shown]
    assert kinds[0] == "display_data"
    assert set(kinds[1:]) == {"update_display_data"}
    assert len({name for _, name, _ in cell.shown}) == 1
    assert "12/12" in cell.shown[-1][2]
