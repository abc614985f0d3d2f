"""`stoker serve`: one OpenAI-compatible address in front of a session. `stoker dashboard`: the page of any session.

`run.py` runs one gateway from its options to its end. `http.py` defines the routes, and `answering.py` the endpoints of
models. `functions.py` contains the decorated functions that run on a pilot, `served.py` the models by name.
`workers.py` starts the processes for `--workers`. `batches.py` runs each batch as a `stoker batch`. The modules
`dashboard*.py` show the page of a session without a gateway.
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
