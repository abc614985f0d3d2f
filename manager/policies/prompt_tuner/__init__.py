"""PromptTuner's Workload Scheduler (§4.4), as dispatch (`pools`, §4.4.1) and residency policies (`residency`, §4.4.2).

The functions below `prompt_tuner` are the ablations of the paper (§6.3). A scenario names an ablation as
`"stoker.manager.policies.prompt_tuner:without_delay"`.
"""

from __future__ import annotations

from stoker.manager.core.seams import Policies, Provisioning
from stoker.manager.policies.prompt_tuner.pools import AllotInRounds, PoolStates
from stoker.manager.policies.prompt_tuner.residency import WINDOW_S, WarmPools
from stoker.manager.policies.provisioning import KeepBlocks


def prompt_tuner(
    *, provisioning: Provisioning | None = None, window_s: float = WINDOW_S, delay: bool = True, together: bool = True,
    reuse: bool = True, early: bool = False, learn: bool = True,
) -> Policies:  # fmt: skip
    """Give each job with a deadline as many warm devices as it needs. docs/policies.md explains the settings."""
    states, asked = PoolStates(learn=learn), provisioning or KeepBlocks()
    residency = WarmPools(states, window_s=window_s, delay=delay, reuse=reuse, early=early, provisioning=asked)
    return Policies(AllotInRounds(states, together=together, reuse=reuse), residency, asked)


def without_delay(provisioning: Provisioning | None = None) -> Policies:
    return prompt_tuner(provisioning=provisioning, delay=False)


def one_by_one(provisioning: Provisioning | None = None) -> Policies:
    """Omit the warm allocator: each replica of a job gets its device separately and waits for the others."""
    return prompt_tuner(provisioning=provisioning, together=False)


def without_reuse(provisioning: Provisioning | None = None) -> Policies:
    return prompt_tuner(provisioning=provisioning, reuse=False)
