"""`stoker serve`: one OpenAI-compatible address in front of a session. `stoker dashboard`: the page of any session.

`run.py` has one gateway, from its options to its end. `http.py` has the routes, and `answering.py` the endpoints of the
models: read, admit, call, answer. `functions.py` has the decorated functions that answer on a pilot, `served.py` the
models by name. `workers.py` starts the processes that answer with `--workers`. `batches.py` runs each batch as a
`stoker batch`. The modules `dashboard*.py` are the page of a session without a gateway.
"""

from __future__ import annotations

APP = __name__.rpartition(".")[2]
