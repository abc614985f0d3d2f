"""`stoker logs` for a call whose part of the log was dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.log_files import drop_middle
from stoker.manager.cli import logs

LINE = b"%06d a line that some call printed\n"


def test_call_whose_part_of_the_log_was_dropped_says_so(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]):
    log = tmp_path / "lib-1.log"
    log.write_bytes(b"".join(LINE % number for number in range(1_200_000)))
    size = log.stat().st_size
    assert drop_middle(log, most_bytes=1 << 20)
    logs._show("c-1", log, start=10 << 20, end=11 << 20)
    out, err = capfdbinary.readouterr()
    assert out == b""
    assert b"1.0 MB of what c-1 printed are gone" in b" ".join(err.split())
    logs._show("c-2", log, start=(1 << 20) - len(LINE % 0), end=size)
    out, err = capfdbinary.readouterr()
    assert out.endswith(LINE % 1_199_999)
    assert b"of what c-2 printed are gone" in b" ".join(err.split())
    logs._show("c-3", log, start=0, end=len(LINE % 0))
    assert capfdbinary.readouterr() == (LINE % 0, b"")
