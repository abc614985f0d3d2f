"""`python -m benchmarks.side MODULE FUNCTION NAME=VALUE ...`: call a function, and print its result as JSON.

A VALUE is JSON, or else a text: `python -m benchmarks.side benchmarks.engine.noop side executor=stoker calls=1000`.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any


def value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    module, function, *options = sys.argv[1:]
    given = {name: value_of(text) for name, _, text in (option.partition("=") for option in options)}
    print(json.dumps(getattr(import_module(module), function)(**given)))
