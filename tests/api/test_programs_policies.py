from __future__ import annotations

from pathlib import Path

import pytest

import stoker
from stoker.errors import CallDroppedError
from stoker.manager.live.replay import story_of_ended_session
from stoker.protocol.session import SessionFolder

POLICY = '''
from stoker.manager.core.seams import Drop
from stoker.manager.policies import HottestFirst

class Fussy(HottestFirst):
    """Drops calls of a low priority."""

    asks_every_call = True

    def place(self, view, call):
        if call.group.options.priority < 0:
            return Drop(call.id, "this site takes no calls of low priority")
        return super().place(view, call)
'''


@stoker.app()
def double(number):
    return 2 * number


@stoker.app(priority=-1)
def low(number):
    return 2 * number


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "fussy.py").write_text(POLICY)
    (tmp_path / "site.toml").write_text('[policy]\nname = "fussy.py:Fussy"\n[pilot]\ndevices = "cpu:1"\n')
    return tmp_path / "site.toml"


def test_custom_policy_decides_after_its_file_is_deleted(site, tmp_path):
    with stoker.load(site, run_dir=str(tmp_path / "runs"), progress=False) as session:
        assert double(4).result(60) == 8
        with pytest.raises(CallDroppedError, match="this site takes no calls of low priority") as dropped:
            low(4).result(60)
    (site.parent / "fussy.py").unlink()
    story = story_of_ended_session(SessionFolder(session.folder), dropped.value.call)
    assert story.found
    assert "this site takes no calls of low priority" in str(story)
