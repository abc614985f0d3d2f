"""Run Parsl's test suite on Stoker's executor: `pytest PARSL/tests --config tests/parsl/stoker_config.py`."""

from parsl.config import Config
from parsl.providers import LocalProvider

from stoker import StokerExecutor


def fresh_config() -> Config:
    """Parsl's logging stays enabled, because some tests read log records."""
    return Config(
        executors=[StokerExecutor(label="stoker", provider=LocalProvider(init_blocks=1, min_blocks=1, max_blocks=1))],
        strategy="simple",
        strategy_period=1,
    )
