from __future__ import annotations

import sys

import pytest

import stoker
from stoker import errors

WRONG = [
    ('[pilot]\ncache_sise = "2 GB"\n', ["line 2", "cache_sise", "cache_size"], "cache_sise"),
    ('[pilott]\ndevices = "cpu"\n', ["line 1", "pilott", "pilot"], "pilott"),
    ('name = "lab"\n\n[session]\nheartbeat = "5 parsecs"\n', ["line 4", "heartbeat", "5 parsecs"], "heartbeat"),
    ('[pilot]\ncache_size = "many"\n', ["line 2", "cache_size", "many"], "cache_size"),
    ('[pilot]\ndevices = "gpus"\n', ["line 2", "devices", '"gpu"'], "devices"),
    ("[pilot]\nmax_blocks = 0\n", ["line 2", "max_blocks"], "max_blocks"),
    ('[provider]\nkind = "slrum"\n', ["line 2", "slrum", "slurm"], "kind"),
    ('[pilot]\ndevices = "cpu\n', ["line 2", "not TOML"], None),
]


def test_load_reports_a_site_error_in_one_line_and_starts_nothing(world, tmp_path):
    site = tmp_path / "lab.toml"
    for text, named, key in WRONG:
        site.write_text(text)
        with pytest.raises(errors.ConfigError) as caught:
            stoker.load(site, run_dir=str(world.runs))
        said = str(caught.value)
        assert "\n" not in said
        for word in (str(site), *named):
            assert word in said
        if key is not None:
            assert caught.value.key.rpartition(".")[2] == key
        assert not world.runs.exists()
        assert world.processes() == []
    with stoker.load(run_dir=str(world.runs)):
        pass


def test_missing_site_file_error_names_the_nearest_file(world, tmp_path):
    (tmp_path / "cluster.toml").write_text("")
    with pytest.raises(errors.ConfigError, match=r"clutser\.toml: no such file.*cluster\.toml"):
        stoker.load(tmp_path / "clutser.toml")
    with pytest.raises(errors.ConfigError, match="there is no folder"):
        stoker.load(tmp_path / "nowhere" / "site.toml")


@pytest.mark.parametrize(("text", "named"), [WRONG[0][:2], (None, ["no such file"])], ids=["key", "missing"])
def test_command_reports_a_site_error_in_one_line(world, tmp_path, text, named):
    site = tmp_path / "lab.toml"
    if text is not None:
        site.write_text(text)
    program = world.spawn(
        [sys.executable, "-m", "stoker.manager.cli.main", "run", "fact_verification", "--site", str(site),
         "--limit", "3"],
        folder=tmp_path / "here",
    )  # fmt: skip
    out, err = program.communicate(timeout=60)
    assert program.returncode not in (0, 130)
    assert "Traceback" not in out + err
    [line] = [line for line in err.splitlines() if str(site) in line]
    for word in named:
        assert word in line
    assert world.processes() == []
    assert not list((tmp_path / "here").rglob("results*"))


def test_unknown_option_is_refused(world):
    with pytest.raises(errors.ConfigError, match="reties"):
        stoker.load(reties=3, run_dir=str(world.runs))
    assert world.processes() == []
    with stoker.load(run_dir=str(world.runs)):
        pass


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


@pytest.mark.parametrize("folder", ["My Projects", "it's $HOME", "runs;#1"])
def test_run_folder_may_have_any_name(world, folder):
    with stoker.load(run_dir=str(world.path / folder), strategy_period=0.2) as session:
        assert stoker.app()(abs)(-3).result(60) == 3
        assert len(session.status().pilots) == 1
