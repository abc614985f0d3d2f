from __future__ import annotations

import sys

import pytest

import stoker
from stoker import errors

WRONG = '[pilot]\ncache_sise = "2 GB"\n'
WORDS = ["line 2", "cache_sise", "cache_size"]


def test_load_reports_a_site_error_in_one_line_and_starts_nothing(world, tmp_path):
    site = tmp_path / "lab.toml"
    site.write_text(WRONG)
    with pytest.raises(errors.ConfigError) as caught:
        stoker.load(site, run_dir=str(world.runs))
    said = str(caught.value)
    assert "\n" not in said
    for word in (str(site), *WORDS):
        assert word in said
    assert caught.value.key.rpartition(".")[2] == "cache_sise"
    with pytest.raises(errors.ConfigError, match="reties"):
        stoker.load(reties=3, run_dir=str(world.runs))
    assert not world.runs.exists()
    assert world.processes() == []
    with stoker.load(run_dir=str(world.runs)):
        pass


def test_command_reports_a_site_error_in_one_line(world, tmp_path):
    site = tmp_path / "lab.toml"
    site.write_text(WRONG)
    program = world.spawn(
        [sys.executable, "-m", "stoker.manager.cli.main", "run", "fact_verification", "--site", str(site),
         "--limit", "3"],
        folder=tmp_path / "here",
    )  # fmt: skip
    out, err = program.communicate(timeout=60)
    assert program.returncode not in (0, 130)
    assert "Traceback" not in out + err
    [line] = [line for line in err.splitlines() if str(site) in line]
    for word in WORDS:
        assert word in line
    assert world.processes() == []
    assert not list((tmp_path / "here").rglob("results*"))


def test_session_ends_with_the_reason_if_no_pilot_can_start(world, tmp_path):
    site = tmp_path / "lab.toml"
    (tmp_path / "file").write_text("")
    site.write_text(f'[pilot]\nscratch = "{tmp_path}/file"\n')
    with stoker.load(site, run_dir=str(world.runs), strategy_period=0.2):

        @stoker.app()
        def one():
            return 1

        with pytest.raises(Exception, match="scratch") as caught:
            one().result(60)
    assert str(tmp_path / "file") in str(caught.value)


def test_run_folder_may_have_any_name(world):
    with stoker.load(run_dir=str(world.path / "it's My $HOME;#1"), strategy_period=0.2) as session:
        assert stoker.app()(abs)(-3).result(60) == 3
        assert len(session.status().pilots) == 1
