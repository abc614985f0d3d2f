"""The factory: a process that submits, watches and cancels the batch jobs (blocks) of a session.

The factory is a separate process because batch commands may hang. `factory` receives the manager's orders, and `keeper`
executes them for one site. `batch` is the interface to a batch system.
"""
