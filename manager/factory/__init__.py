"""The factory: a process that submits, watches and cancels the batch jobs of a session's blocks.

The manager decides how many blocks there should be; it runs no command that may hang. `factory` takes its orders,
`keeper` carries them out for one site, `batch` names what a batch system must do, and `batches` chooses one.
"""
