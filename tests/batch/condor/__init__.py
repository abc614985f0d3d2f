"""A pool of HTCondor for tests: of its own daemons where these are on PATH, else a stand-in.

`make condor` runs the tests over the daemons (`real`, which has the methods of `pool`) and keeps a record. The rest of
this page is about the stand-in, for machines where no HTCondor is installed.

`condor_submit`, `condor_q`, `condor_history`, `condor_rm`, `condor_hold`, `condor_release`, `condor_vacate_job`,
`condor_status` and `condor_config_val` are executables in a folder for PATH; they print what the real ones print, to
the same stream, with the same exit codes. What HTCondor computes, HTCondor computes: job ads come from its own
bindings (`Submit.jobs`), and its own ClassAds evaluate expressions and matches. The rest is ours: a queue in SQLite, a
schedd that matches jobs with slots, and a starter a job that runs it in a sandbox. They are processes: a schedd that is
killed leaves its jobs running, and the next one finds them again.

    Pool (pool.py)               what a test holds: the machines, PATH, faults
    ads, queue                   ClassAds of jobs and machines; where the jobs' are kept
    submit, query, analyze, act, status
                                 the commands
    client, commands             how an executable comes to be one of them
    schedd, slots                who matches and starts jobs, and with which part of a machine
    starter, transfer            who runs a job, and what comes to its sandbox and goes back

Its words were compared with those of the daemons of HTCondor 25.14. As there, `NumJobStarts` is written when a job
leaves its machine, `condor_status -startd` shows daemons, a pool may release held jobs by itself (`release_s`), and
machines with users of their own hold a job whose output they may not write (`slot_users`). What it leaves out: those
users themselves, a /tmp of the job's own, priorities, flocking, checkpoints, the event log, periodic expressions while
a job is being started, and time: what takes HTCondor seconds to minutes takes tenths of a second here, unless a pool is
made with `match_s`. A machine that is lost keeps its jobs running, as far as anybody knows, until their leases are over
(`lose`, `crash`); a condor_master that is killed leaves jobs alive without their folders (`kill_master`).
"""
