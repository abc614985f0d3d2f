from __future__ import annotations

from core.builders import Cluster

from stoker.config import parse_site
from stoker.manager.live.helper_processes import create_source
from stoker.protocol import to_manager as say
from stoker.protocol.show_status import render


def test_status_and_explanations_use_the_name_of_the_site() -> None:
    site = parse_site('name = "basement"\n[provider]\nkind = "slurm"', file="site.toml")
    c = Cluster().sources(create_source(site, kept=False))
    [block] = c.core.state.blocks
    assert "block of source basement" in c.story(block)
    c.tell("factory", say.SourceTrouble("basement", "squeue has not answered for 30 s"))
    status = c.status()
    assert status.trouble == {"basement": "squeue has not answered for 30 s"}
    assert any("basement: squeue has not answered for 30 s" in line for line in render(status))
