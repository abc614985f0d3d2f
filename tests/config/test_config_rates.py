from __future__ import annotations

import math

import pytest

from stoker.errors import UnitError
from stoker.units import parse_rate

RATES = {
    "1.2 GB/s": 1.2e9, "500MB/s": 5e8, "1 GiB / s": 2.0**30, "10 Gbit/s": 1.25e9, "8 bit/s": 1.0, "3 B/s": 3.0,
    "unlimited": math.inf,
}  # fmt: skip


@pytest.mark.parametrize("text", RATES)
def test_rates_are_in_bytes_per_second(text: str) -> None:
    assert parse_rate(text) == pytest.approx(RATES[text])


@pytest.mark.parametrize("text", ["10 Gb/s", "1.2 GB", "1.2", "fast", "-1 GB/s", "1 GB/min", "", -1.0, math.nan, True])
def test_invalid_rate_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(UnitError, match="is not a rate"):
        parse_rate(text)  # type: ignore[arg-type]
