"""The factory: a process that submits, watches and cancels the batch jobs of a session's blocks.

The factory is a separate process because batch commands may hang. `factory` receives the manager's orders. `keeper`
executes the orders for one site. `batch` is the interface to a batch system; `batches` selects a batch system.
"""
