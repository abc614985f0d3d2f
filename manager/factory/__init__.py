"""The factory: a process that submits, watches and cancels the batch jobs of a session's blocks.

The manager only decides how many blocks to request, because batch commands may hang. `factory` receives its orders.
`keeper` executes them for one site. `batch` is the interface to a batch system; `batches` selects one.
"""
