"""What changes in a run when workers leave or join.

Workers keep their numbers; members are the workers that train. A change follows a committed update. Members keep their
parameters, optimizer state, buffers and clock, and use the topology for their new number; a worker that joins starts
with a copy of the state of the member before it. Messages in flight are launched again among the members. The learning
rate schedule stays, and so does either each worker's batch (`elastic.keep=local_batch`) or the global batch, rounded
down to equal shares (`elastic.keep=global_batch`). A learning rate that is scaled to the global batch
(`optimizer.lr_batch`) follows it. The rest of the epoch is dealt to the members.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from common.config.config import Config, ConfigError, TopologyConfig
from common.config.elastic import Workers
from common.training.optimization import rate_of
from common.training.stream import Dealing
from common.training.worker import Worker


def config_of(config: Config, members: Workers) -> Config:
    """Return the configuration with which these members of the run's workers train."""
    if members == config.all_workers:
        return config
    n, per_host = len(members), config.workers.per_host or 1
    on_host = [sum(member // per_host == host for member in members) for host in {m // per_host for m in members}]
    per_host = on_host[0] if len(set(on_host)) == 1 else 1  # else no topology could tell the hosts apart
    workers = config.workers.model_copy(update={"count": n, "per_host": per_host})
    training = config.training.model_copy(update={"batch_size": batch_of(config, n)})
    changed = config.model_copy(update={"workers": workers, "training": training})
    try:
        changed.build_topology()
    except ConfigError:
        changed = changed.model_copy(update={"topology": TopologyConfig(name=config.elastic.fallback)})
        changed.build_topology()
    return changed


def batch_of(config: Config, n: int) -> int:
    """Return the global batch of n of the run's workers; at least one sample in each of their passes."""
    batch, passes = config.training.batch_size, config.ranks_per_worker * config.training.gradient_accumulation
    if config.elastic.keep == "local_batch":
        return batch // config.n * n
    return max(1, batch // (n * passes)) * n * passes


def donor_of(member: int, former: Workers) -> int:
    """Return the worker whose state a joining worker copies: the former member before it, cyclically."""
    return former[bisect_left(former, member) - 1]


def follow(worker: Worker, config: Config, clock: int) -> None:
    """Give a worker the members' learning rate and weight decay after `clock` updates, even if it missed some."""
    for group in worker.optimizer.param_groups:
        rate = group["initial_lr"] = rate_of(group, config.optimizer, config.lr)
        group["weight_decay"] = group["weight_decay"] and config.optimizer.coupled_decay(rate)
    worker.schedule.base_lrs = [group["initial_lr"] for group in worker.optimizer.param_groups]
    worker.schedule.last_epoch = clock - 1
    worker.schedule.step()


def kept(state: Mapping[str, Any], clock: int, dealing: Dealing) -> dict[str, Any]:
    """Return the state with which a staying worker continues after `clock` updates; its random numbers continue too."""
    streams = [
        {"drawn": dealing.drawn, "dealing": tuple(dealing), "random": stream["random"]} for stream in state["streams"]
    ]
    return {**state, "clock": clock, "streams": streams}


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with which a joining worker starts, as a copy; random numbers and counters start afresh."""
    return {**state, "streams": None, "counters": {}}
