import pytest
from full_disk import full_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError, StokerError
from stoker.run_folder import RecordLog

KEY = ("p", "id")


def record(number, prompt="x"):
    return {"p": prompt, "id": str(number), "text": f"é\n{number}"}


def test_appended_records_are_read_again(tmp_path):
    with RecordLog(tmp_path / "log", key=KEY) as log:
        assert log.append([record(1), record(2)]) == 2
        assert log.append([record(2), record(3), record(3)]) == 1
    with RecordLog(tmp_path / "log", key=KEY) as log:
        assert list(log) == [record(1), record(2), record(3)]
        assert ("x", "2") in log
        assert ("y", "2") not in log
        assert log.get(("x", "3")) == record(3)
        assert log.dropped_bytes == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(1, 8), cut=st.floats(0, 1), again=st.integers(0, 10))
def test_any_truncation_costs_at_most_the_last_record(tmp_path, count, cut, again):
    path = tmp_path / "log"
    path.unlink(missing_ok=True)
    with RecordLog(path, key=KEY) as log:
        log.append(record(number) for number in range(count))
    whole = path.read_bytes()
    at = round(cut * len(whole))
    path.write_bytes(whole[:at])
    complete = whole[:at].count(b"\n")
    with RecordLog(path, key=KEY) as log:
        assert list(log) == [record(number) for number in range(complete)]
        # Resuming writes the missing records, and no record twice.
        log.append(record(number) for number in range(max(count, again)))
    with RecordLog(path, key=KEY) as log:
        assert list(log) == [record(number) for number in range(max(count, again))]
    assert path.read_bytes().count(b"\n") == max(count, again)


def test_damaged_line_before_the_last_is_named(tmp_path):
    (tmp_path / "log").write_bytes(b'{"p":"x","id":"1"}\n{"p":"x"}\n{"p":"x","id":"2"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        RecordLog(tmp_path / "log", key=KEY)


def test_full_disk_leaves_no_torn_record(tmp_path):
    path = tmp_path / "log"
    with RecordLog(path, key=KEY) as log:
        log.append([record(1)])
        before = path.read_bytes()
        with full_disk(len(before) + 5), pytest.raises(StokerError, match="the 1 results before are kept"):
            log.append([record(2)])
        assert path.read_bytes() == before
        assert log.append([record(2)]) == 1
    with RecordLog(path, key=KEY) as log:
        assert list(log) == [record(1), record(2)]
