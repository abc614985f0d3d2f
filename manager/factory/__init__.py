"""The factory: blocks through batch systems.

The manager decides how many blocks there should be; it runs no command that may hang. The factory is a process beside
it (`stoker.manager.factory.main`) that submits, watches and cancels their jobs, and tells what the batch system says.

- `batch`: what every batch system can do; `slurm`, `condor`, `local` and `parsl_batch` (PBS, LSF, Grid Engine,
  Kubernetes) do it. `batches` chooses.
- `source`: the blocks of one site, and the one thread that talks to its batch system.
- `factory`, `link`, `main`: orders in, news out.
- `script`, `pilot_command`: what is submitted (pure).
"""
