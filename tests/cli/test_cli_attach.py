"""`stoker attach` after its manager moved."""

from __future__ import annotations

from stoker.manager.cli.status import out_of_sight
from stoker.site import Environment, EnvironmentKind, Provider, ProviderKind, Site

HERE, THERE = "tcp://10.0.0.1:21000", "tcp://10.0.0.2:21000"
SHARED = Site(name="lab")
POOL = Site(
    name="pool",
    provider=Provider(kind=ProviderKind.CONDOR, shared_files=False),
    environment=Environment(kind=EnvironmentKind.PACKED),
)


def test_pilots_without_shared_files_that_lose_their_manager():
    said = out_of_sight([SHARED, POOL], before=HERE, now=THERE)
    assert "pilots of pool share no files with this host" in said
    assert f"looking at {HERE}" in said
    assert "attach from the host where it was" in said


def test_who_finds_it_again_is_not_worried():
    assert out_of_sight([SHARED], before=HERE, now=THERE) == ""
    assert out_of_sight([SHARED, POOL], before=HERE, now=HERE) == ""
