"""The factory: blocks through batch systems.

The manager decides how many blocks there should be; it runs no command that may hang. The factory is a process beside
it (`stoker.manager.factory.main`) that submits, watches and cancels their jobs, and tells what the batch system says.

- `batch`: what every batch system can do; `slurm`, `condor`, `listed` (PBS, LSF, Grid Engine), `kubernetes` and `local`
  do it, `batches` chooses.
- `providers`, `pilot_command`: what is submitted, and Parsl's providers, which submit it (`parsl_parts` imports them).
- `commands`, `submitting`, `job_ids`, `output`, `advice`: commands bounded in time, and what their words mean.
- `absences`: when a job that listings lack is lost.
- `keeper`: the blocks of one site; `worker`: the one thread that talks to its batch system.
- `factory`, `link`, `main`: orders in, updates out.
"""
