"""`stoker serve`: one OpenAI-compatible address in front of a session. `stoker dashboard`: the web page of any session.

`run.py` runs a gateway. `http.py` defines the routes, `answering.py` the endpoints of models, and `functions.py` the
decorated functions that run on a pilot. `workers.py` starts the processes for `--workers`, and `batches.py` starts a
`stoker batch` process per batch.
"""
