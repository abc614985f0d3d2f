from __future__ import annotations


class EvenCost:
    """Step times: 1 ms to read a token, `decode` seconds per decode step."""

    def __init__(self, decode: float = 0.05) -> None:
        self._decode_s = decode

    def prefill_s(self, tokens: int, length: float) -> float:
        assert length == tokens / 2
        return tokens / 1000

    def decode_s(self, rows: int, length: float) -> list[float]:
        assert rows > 0
        assert length > 0
        return [self._decode_s]
