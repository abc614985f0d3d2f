"""A stand-in for an HTCondor pool, for machines where none is installed.

`condor_submit`, `condor_q`, `condor_history`, `condor_rm`, `condor_hold`, `condor_release` and `condor_vacate_job` are
executables in a folder for PATH; they print what the real ones print, to the same stream, with the same exit codes.
What HTCondor computes, HTCondor computes: job ads come from its own bindings (`Submit.jobs`), and its own ClassAds
evaluate expressions and matches. The rest is ours: a queue in SQLite, a schedd that matches jobs with slots, and a
starter a job that runs it in a sandbox. They are processes: a schedd that is killed leaves its jobs running, and the
next one finds them again.

    Pool (pool.py)               what a test holds: the machines, PATH, faults
    ads, queue                   ClassAds of jobs and machines; where the jobs' are kept
    submit, query, analyze, act  the commands
    client, commands             how an executable comes to be one of them
    schedd, slots                who matches and starts jobs, and with which part of a machine
    starter, transfer            who runs a job, and what comes to its sandbox and goes back

Its words were compared with those of the daemons of HTCondor 25.14. What it leaves out: users other than you,
priorities, flocking, checkpoints, the event log, periodic expressions while a job is being started, and time: what
takes HTCondor seconds to minutes takes tenths of a second here, unless a pool is made with `match_s`. A machine that
is lost keeps its jobs running, as far as anybody knows, until their leases are over (`lose`, `crash`); a condor_master
that is killed leaves jobs alive without their folders (`kill_master`).
"""
