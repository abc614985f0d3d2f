from __future__ import annotations

from batch.test_batch_site_suite import prove
from faults.world import World
from taskvine.conftest import SITE


def test_site_with_taskvine_starts_and_keeps_contexts(taskvine, tmp_path):
    with World(tmp_path / "world").entered() as world:
        site = world.path / "site.toml"
        site.write_text(SITE.format(first=1, most=1))
        page = prove(site, world.home, "-k", "starts or is_hot or gang")
    verdicts = {each["title"]: each["verdict"] for each in page["promises"]}
    assert verdicts == {
        "a pilot starts and runs a call": "holds",
        "a context loads once and serves the next call": "holds",
        "a call runs on a gang of two": "not tried",
    }, page
