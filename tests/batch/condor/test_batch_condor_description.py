from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from stoker.config import Site, parse_site
from stoker.manager.factory.batch import SubmissionRefused
from stoker.manager.factory.condor_description import (
    gpu_type_expression,
    render_description,
    render_script,
    session_constraint,
)

SITE = """
name = "pool"
[provider]
kind = "condor"
walltime = "90 min"
"""


def site(text: str = "", *, pilot: str = "") -> Site:
    return parse_site(f"{SITE}{text}\n[pilot]\n{pilot}", file="pool.toml")


@pytest.fixture
def ad_of(bindings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the job ad of a description in a folder with an odd name."""
    monkeypatch.setenv("CONDOR_CONFIG", os.devnull)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import htcondor
    folder = tmp_path / 'it\'s, a "folder" $(x)'
    folder.mkdir()
    monkeypatch.chdir(folder)

    def make(text: str) -> Any:
        (folder / "stoker-k3v9-b7.sh").touch(mode=0o700)
        ads = list(htcondor.Submit(text).jobs(clusterid=12))
        assert len(ads) == 1
        return ads[0]

    return make


def test_submit_description_requests_what_the_site_sets(ad_of: Any) -> None:
    given = 'gpus = "a10:2"\ncores = 6\nmemory = "10 GB"\naccount = "group_physics"\nrequirements = \'Machine != "n3"\''
    ad = ad_of(render_description(site(given, pilot='cache_size = "1 GB"'), session="k3v9", block="b7"))
    assert [ad.eval(f"Request{what}") for what in ("GPUs", "Cpus", "Memory", "Disk")] == [2, 6, 9537, 976563]
    assert ad["AccountingGroup"].startswith("group_physics")
    assert 'Machine != "n3"' in str(ad.lookup("Requirements"))
    assert (ad["StokerSession"], ad["StokerSource"], ad["StokerBlock"], ad["StokerWalltime"]) == (
        "k3v9",
        "pool",
        "b7",
        5400,
    )
    assert (ad["MaxWallTime"], ad["JobBatchName"]) == (90, "stoker-k3v9")
    assert ad["WantGracefulRemoval"] is True
    assert Path(ad["Cmd"]).name == "stoker-k3v9-b7.sh"


def test_settings_missing_in_the_site_are_left_to_the_pool(ad_of: Any) -> None:
    text = render_description(site(pilot='scratch = "/scratch"'), session="k3v9", block="b7")
    assert "require" not in text
    ad = ad_of(text)
    assert "RequestGPUs" not in ad
    assert ad.eval("RequestCpus") == 1
    assert ad.eval("RequestMemory") == 2048, "HTCondor would ask for 1 MB, the size of the script"


def test_files_are_sent_only_if_shared_files_is_false(ad_of: Any) -> None:
    ad = ad_of(render_description(site(), session="k3v9", block="b7"))
    assert (ad["ShouldTransferFiles"], ad["TransferOutput"]) == ("IF_NEEDED", "")
    bare = parse_site(f'{SITE}shared_files = false\n[environment]\nkind = "packed"\n', file="pool.toml")
    ad = ad_of(
        render_description(bare, session="k3v9", block="b7", files=["../session.json", "../keys/pilot key.json"])
    )
    assert (ad["ShouldTransferFiles"], ad["TransferOutput"]) == ("YES", "")
    assert [name.strip() for name in ad["TransferInput"].split(",")] == ["../session.json", "../keys/pilot key.json"]


@pytest.mark.parametrize("name", ["a,b", "a\nb", " a", "b "])
def test_file_that_cannot_be_transferred_is_refused(name: str) -> None:
    with pytest.raises(SubmissionRefused, match="HTCondor cannot transfer"):
        render_description(site(), session="k3v9", block="b7", files=[name])


def test_condor_options_precede_stokers_own_lines(ad_of: Any) -> None:
    given = "options = ['+ProjectName = \"stoker\"', 'request_disk = 5', '+StokerBlock = \"b8\"', 'priority = 3']"
    ad = ad_of(render_description(site(given), session="k3v9", block="b7"))
    assert (ad["ProjectName"], ad.eval("RequestDisk"), ad["JobPrio"], ad["StokerBlock"]) == ("stoker", 5, 3, "b7")


@pytest.mark.parametrize("line", ["queue 5", " Queue", "queue in (a b)"])
def test_second_queue_statement_is_refused(line: str) -> None:
    with pytest.raises(SubmissionRefused, match="one job per block"):
        render_description(site(f"options = ['{line}']"), session="k3v9", block="b7")


@pytest.mark.parametrize(
    ("kind", "yes", "no"),
    [
        ("a10", ["NVIDIA A10"], ["NVIDIA A100-SXM4-40GB", "NVIDIA A10G"]),
        ("A100", ["NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe"], ["NVIDIA A10", "NVIDIA RTX A1000"]),
        ("v100", ["Tesla V100-PCIE-16GB"], ["NVIDIA A100-SXM4-40GB"]),
        ("rtx-6000", ["Quadro RTX 6000"], ["NVIDIA RTX 60000"]),
        ("titan_x", ["NVIDIA TITAN X (Pascal)", "GeForce GTX TITANX"], ["NVIDIA TITAN Xp"]),
    ],
)
def test_gpu_type_matches_a_word_of_the_device_name(ad_of: Any, kind: str, yes: list[str], no: list[str]) -> None:
    import classad

    ad = ad_of(render_description(site(f'gpus = "{kind}:1"'), session="k3v9", block="b7"))
    wanted = ad.lookup("RequireGPUs")
    assert str(wanted) == str(classad.ExprTree(gpu_type_expression(kind)))
    fits = {name: wanted.eval(classad.ClassAd({"DeviceName": name})) for name in yes + no}
    assert fits == {**dict.fromkeys(yes, True), **dict.fromkeys(no, False)}


@pytest.mark.parametrize(
    ("state", "removed"),
    [
        ("JobStatus = 1", False),
        ("JobStatus = 2; JobCurrentStartDate = time() - 5300; JobCurrentStartExecutingDate = time() - 5300", False),
        ("JobStatus = 2; JobCurrentStartDate = time() - 5500; JobCurrentStartExecutingDate = time() - 5500", True),
        ("JobStatus = 2; JobCurrentStartDate = time() - 5500; JobCurrentStartExecutingDate = time() - 60", False),
        ("JobStatus = 2; JobCurrentStartDate = time() - 60; JobCurrentStartExecutingDate = time() - 9000", False),
        ("JobStatus = 2; JobCurrentStartDate = time() - 5500", True),
        ("JobStatus = 5; HoldReasonCode = 13; EnteredCurrentStatus = time() - 60", False),
        ("JobStatus = 5; HoldReasonCode = 13; EnteredCurrentStatus = time() - 3600", True),
        ("JobStatus = 5; HoldReasonCode = 1; EnteredCurrentStatus = time() - 3600", False),
        ("JobStatus = 5; HoldReasonCode = 16; EnteredCurrentStatus = time() - 3600", False),
    ],
)
def test_job_is_removed_after_its_walltime_or_a_long_hold(ad_of: Any, state: str, removed: bool) -> None:
    import classad

    ad = ad_of(render_description(site(), session="k3v9", block="b7"))
    later = classad.ClassAd(f"[ {state} ]")
    for name in later.keys():  # noqa: SIM118
        ad[name] = later.lookup(name)
    assert ad.eval("PeriodicRemove") is removed


def test_jobs_of_other_sessions_are_ignored(ad_of: Any) -> None:
    import classad

    mine = classad.ExprTree(session_constraint("k3v9"))
    assert mine.eval(ad_of(render_description(site(), session="k3v9", block="b7"))) is True
    assert mine.eval(classad.ClassAd({"StokerSession": "zzzz", "StokerSource": "pool"})) is False
    assert mine.eval(classad.ClassAd({"Owner": "ana"})) is classad.Value.Undefined


def test_submitted_script_execs_the_pilot() -> None:
    text = render_script(site("worker_init = 'module load cuda'"), command="python -m pilot --session '/a b'")
    assert text.startswith("#!/bin/bash\nexport PATH HOME\n")
    assert text.endswith("/etc/profile\nmodule load cuda\nexec python -m pilot --session '/a b'\n")
