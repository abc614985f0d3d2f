"""Which engine a model is loaded for: vLLM where it is asked for, or installed beside a GPU; else Stoker's own."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

import pytest
from lazily import lazily

from stoker.errors import StokerError

loading = lazily("stoker.contexts.language_model", needs="torch transformers")
ABSENT = importlib.util.find_spec("vllm") is None


@pytest.mark.skipif(not ABSENT, reason="vLLM is installed here")
def test_vllm_that_is_asked_for_and_not_installed_says_what_to_install() -> None:
    with pytest.raises(StokerError, match=r"vLLM is not installed here; pip install 'stoker\[vllm\]'"):
        loading.load_model("models/mine", engine="vllm")
    assert loading.why_vllm("auto", device="cuda:0") == ""


def test_no_other_engine_asks_for_vllm() -> None:
    for engine in ("transformers", "continuous", "static"):
        assert loading.why_vllm(engine, device="cuda:0") == ""
    assert loading.why_vllm("auto", device="cpu") == ""


def test_vllm_that_is_broken_is_told_of_and_auto_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "vllm.py").write_text("raise OSError('libcuda.so.1: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(StokerError, match=r"does not import \(libcuda.so.1: cannot open\)"):
        loading.why_vllm("vllm", device="cuda:0")
    with caplog.at_level(logging.WARNING):
        assert loading.why_vllm("auto", device="cuda:0") == ""
    assert "libcuda.so.1" in caplog.text


def test_vllm_that_imports_is_taken_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert "GPU" in loading.why_vllm("auto", device="cuda:0")
    assert loading.why_vllm("auto", device="cpu") == ""
    assert loading.why_vllm("vllm", device="cpu") == "it was asked for"
    sys.modules.pop("vllm", None)
