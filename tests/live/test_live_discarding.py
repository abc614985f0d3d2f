"""Results that no program will read are removed, whatever a pilot says that their files are called."""

from __future__ import annotations

import pytest

from stoker.manager.live.server import discard_result
from stoker.protocol.session import SessionFolder


def test_a_result_is_removed_and_no_other_file(folder: SessionFolder) -> None:
    result, other = folder.objects / "result-1", folder.objects / "weights"
    for file in (result, other, folder.path / "result-2"):
        file.touch()
        discard_result(folder, str(file))
    assert not result.exists()
    assert other.exists()
    assert (folder.path / "result-2").exists()
    discard_result(folder, str(result))


@pytest.mark.parametrize("name", ["result-\0", "result-" + "x" * 300, "result-folder"])
def test_a_name_that_cannot_be_removed_does_not_end_the_manager(folder: SessionFolder, name: str) -> None:
    """The error left the manager's loop, and a pilot chooses the name."""
    (folder.objects / "result-folder").mkdir()
    discard_result(folder, str(folder.objects / name))
