"""A run whose workers died and joined, computed anew in one process from the membership rows of its metrics.jsonl."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from common.config.config import Config
from common.config.elastic import Workers
from common.flat import FlatVector, flatten
from common.optim import DmSGD, QGDmSGD
from common.parallel.anchors import Anchors
from common.parallel.averaging import Debiasing
from common.parallel.checks import resolve_topology
from common.parallel.gossip.buckets import ScheduledBucket, fragments_of, plan_buckets
from common.parallel.gossip.exchange import mix_
from common.parallel.optimizers import MomentumVectors
from common.topology import Topology
from common.training.members import config_of, donor_of, follow
from common.training.optimization import build_optimizer, build_schedule
from common.training.stream import BEGINNING, Dealing, Stream
from common.training.task import Task, load_task

CPU = torch.device("cpu")


@dataclass
class Replica:
    """A worker without a network. momentum: the optimizer's, where that is mixed; streams: of its ranks"""

    module: nn.Module
    vector: FlatVector
    anchors: Anchors
    debiasing: Debiasing
    momentum: MomentumVectors | None
    optimizer: Optimizer
    schedule: LRScheduler
    streams: list[Stream]


def membership_rows(run: Path) -> list[dict[str, Any]]:
    *lines, _ = (run / "metrics.jsonl").read_text().split("\n")  # the last one may be in the making
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["split"] == "membership"]


def replay(config: Config, run: Path, steps: int) -> dict[int, Replica]:
    """Return the replicas of the last members after `steps` updates."""
    torch.set_num_threads(1)
    task, members = load_task(config.task)(config), config.all_workers
    replicas = {m: begin(task, config, members, m, BEGINNING) for m in members}
    clock = 0
    for row in membership_rows(run):
        stayed = {member: (row["step"], None) for member in members if member not in row["left"]}  # of a script
        reports = {int(m): tuple(report) for m, report in row.get("reports", stayed).items()}
        run_stage(task, config_of(config, members), replicas, clock, reports)
        clock, members = row["step"], tuple(row["members"])
        replicas = change(task, config, replicas, {*reports}, members, clock, lost=bool(row["left"]))
    run_stage(task, config_of(config, members), replicas, clock, dict.fromkeys(members, (steps, None)))
    return replicas


def begin(task: Task, config: Config, members: Workers, member: int, dealing: Dealing) -> Replica:
    staged = config_of(config, members)
    torch.manual_seed(config.seed)
    module = task.build_model()
    (vector,) = flatten(module)
    rank, n, per_worker = members.index(member), len(members), config.ranks_per_worker
    optimizer = build_optimizer(config.optimizer, staged.lr, module)
    schedule = build_schedule(config.schedule, optimizer, config.training.steps or 0, 1)
    plan = config.parallel.options().plan
    anchors = Anchors(plan, [vector.data])
    anchors.fragments = fragments_of(buckets_of(staged, vector), plan.fragments)
    streams = []
    for index in range(per_worker):
        place = rank * per_worker + index
        data = task.train_data(place, staged.ranks, staged.training.batch_size // staged.ranks, CPU)
        number = member * per_worker + index
        streams.append(Stream(data, config.seed, place, CPU, staged.ranks, dealing, number))
    debiasing = Debiasing(topology_of(staged), rank, [vector.data])
    mixes = isinstance(optimizer, DmSGD) and optimizer.momentum_mixing and n > 1
    momentum = MomentumVectors(optimizer, [vector]) if mixes else None
    if isinstance(optimizer, QGDmSGD):
        optimizer.deferred = True
    return Replica(module, vector, anchors, debiasing, momentum, optimizer, schedule, streams)


def topology_of(config: Config) -> Topology:
    return resolve_topology(config.build_topology(), config.parallel.options(), config.n)


def buckets_of(config: Config, vector: FlatVector) -> list[ScheduledBucket]:
    """Return the buckets that these members exchange."""
    parallel, topology = config.parallel, topology_of(config)
    return plan_buckets([vector.data], topology, parallel.bucket_mb, parallel.phases, parallel.fragments)


def run_stage(
    task: Task, config: Config, replicas: dict[int, Replica], clock: int, reports: Mapping[int, tuple[int, int | None]]
) -> None:
    """Let every replica do what its worker reported: (updates, buckets merged in the last round); the dead do all."""
    members, plan = sorted(replicas), config.parallel.options().plan
    buckets = buckets_of(config, replicas[members[0]].vector)
    last = max(updates for updates, _ in reports.values())
    for step in range(clock, last):
        for replica in replicas.values():
            replica.anchors.prepare(step)
        sent = [mixed(replicas[member]).clone() for member in members]
        trained, mixes, momentum_mixes = [], [], []
        for index, member in enumerate(members):
            updates, merged = reports.get(member, (last, None))
            if step < updates:
                replica = replicas[member]
                limit = merged if step == updates - 1 else None
                trained.append(replica)
                if replica.momentum is not None:  # it travels before the parameters
                    momentum_mixes.append(partial(mix_by_hand, index, buckets[:limit], partial(plan.merged, step)))
                    limit = None if limit is None else max(0, limit - len(buckets))
                mixes.append(partial(mix_by_hand, index, buckets[:limit], partial(plan.merged, step), mixed(replica)))
        for replica, mix in zip(trained, mixes, strict=True):
            replica.module.train()
            for stream in replica.streams:
                with stream.random.active():
                    (task.loss(replica.module, next(stream)) / len(replica.streams)).backward()
            replica.anchors.merge(step, partial(mix, sent))
            replica.debiasing.remember()
            replica.optimizer.step()
            replica.debiasing.scale(step + (plan.order == "awc"))
            replica.anchors.end(step, lambda *_: None)
        if momentum_mixes:
            mix_momentum([replicas[member] for member in members], trained, momentum_mixes)
        if plan.merge_after == 0:
            adapt_then_combine(replicas, trained, mixes, plan.ending(step))
        for replica in trained:
            if isinstance(replica.optimizer, QGDmSGD):
                replica.optimizer.track()
            replica.optimizer.zero_grad()
            replica.schedule.step()


def mix_momentum(everybody: Sequence[Replica], trained: Sequence[Replica], mixes: Sequence[partial]) -> None:
    """Mix the momentum that all have after their gradients, and descend."""
    sent = [replica.momentum.flat()[0].clone() for replica in everybody if replica.momentum is not None]
    for replica, mix in zip(trained, mixes, strict=True):
        assert replica.momentum is not None
        mix(replica.momentum.flat()[0], sent, 0, [])
        replica.momentum.optimizer.descend()


def adapt_then_combine(
    replicas: Mapping[int, Replica], trained: Sequence[Replica], mixes: Sequence[partial], fragments: Sequence[int]
) -> None:
    """Mix what all have after their updates, which become the parameters."""
    sent = [mixed(replicas[member]).clone() for member in sorted(replicas)]
    for replica, mix in zip(trained, mixes, strict=True):
        for fragment in fragments:
            mix(sent, fragment, [])
            for part in replica.anchors.fragments[fragment]:
                replica.vector.data[part.span] = mixed(replica)[part.span]


def mix_by_hand(
    index: int,
    buckets: Sequence[ScheduledBucket],
    number_of: Callable[[int], int],
    own: Tensor,
    sent: Sequence[Tensor],
    fragment: int,
    following: Sequence[Tensor],
) -> None:
    """Mix a fragment of worker `index` with what all have sent; arguments from `fragment` on as of `Mixer.merge`.

    buckets:   those that arrived, of all fragments
    number_of: the round of a fragment
    """
    for bucket in buckets:
        if bucket.fragment != fragment:
            continue
        round_ = bucket.topology.round(number_of(fragment))
        received = [(sent[j][bucket.span], weight) for j, weight in round_.in_peers(index).items()]
        before = own[bucket.span].clone()
        mix_(own[bucket.span], round_.self_weight(index), received)
        for vector in following:
            vector[bucket.span] += own[bucket.span] - before


def mixed(replica: Replica) -> Tensor:
    """Return what of a replica is mixed."""
    return replica.anchors.anchors[0] if replica.anchors.anchors else replica.vector.data


def change(
    task: Task, config: Config, former: dict[int, Replica], holders: set[int], members: Workers, clock: int, lost: bool
) -> dict[int, Replica]:
    """Return the replicas of the next members; holders: those of the former ones that are alive."""
    some = former[min(holders)].streams[0]
    some.drawn = clock * config.training.gradient_accumulation
    dealing = some.rest()
    replicas = {}
    for member in members:
        source = former[member if member in holders else donor_of(member, tuple(sorted(holders)))]
        replica = replicas[member] = begin(task, config, members, member, dealing)
        replica.module.load_state_dict(source.module.state_dict())
        for tensor, other in zip(replica.anchors.state.values(), source.anchors.state.values(), strict=True):
            tensor.copy_(other)
        replica.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
        replica.schedule.load_state_dict(source.schedule.state_dict())
        follow(replica, config_of(config, members), clock)
        if member in holders and not (lost and config.ranks_per_worker > 1):
            for stream, other in zip(replica.streams, source.streams, strict=True):
                stream.random.state = other.random.state
    return replicas
