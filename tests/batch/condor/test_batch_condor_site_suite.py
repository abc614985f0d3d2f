"""The site suite on HTCondor: over its own daemons where they are on PATH, else over the stand-in."""

from __future__ import annotations

import pytest
from batch.condor.machines import machine
from batch.condor.test_batch_condor_programs import write_site
from batch.test_batch_site_suite import NOT_TRIED, prove

pytestmark = pytest.mark.long


@pytest.mark.slow
def test_every_promise_holds_on_htcondor(make_pool, world):
    make_pool(machine("n1"), machine("n2"))
    site = write_site(world.path, provider='memory = "1 GB"')
    page = prove(site, world.home)
    verdicts = {each["title"]: each["verdict"] for each in page["promises"]}
    one_device = {"a context over two devices holds both"}
    assert {title for title, verdict in verdicts.items() if verdict != "holds"} == NOT_TRIED | one_device, page
    assert set(verdicts.values()) == {"holds", "not tried"}, page
