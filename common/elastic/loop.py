"""The training loop of a real worker that outlives others, or takes the place of one that died.

A membership (`common.elastic.membership`) is a stage of the training loop with groups, wrapper and optimizer of its
own, built around the state that the worker has in memory. After a loss all go on from the largest number of committed
updates: who is behind skips what it missed, its batches too. What every worker has merged in the round that broke is in
the membership row of metrics.jsonl, from which the run can be replayed bit for bit.

The ranks of a worker may have come to different points: they go on with what the first of them has. One whose average
of gradients broke gives the update up.
"""

import gc
import io
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from common.config.elastic import ranks_of, workers_of
from common.elastic.membership import DismissedError, Member, Membership, Report
from common.parallel.collectives import PeerError, explained, gather_objects
from common.parallel.process_groups import abort_groups
from common.record.checkpoint import CheckpointError
from common.record.run_folder import RunFolder, open_on_first
from common.training.interruption import Interruption
from common.training.loop import Length, Stage, begin_stage, lengths, step_named, train_stage
from common.training.members import copied, donor_of, follow, kept
from common.training.profiling import Trace
from common.training.session import Setup

REPLICATED = ("model", "communication", "optimizer", "schedule", "scaler")  # of a worker's state, alike on its ranks


class Held(NamedTuple):
    """What a worker has when it leaves a membership: what it reports, and its state."""

    report: Report = Report()
    state: dict[str, Any] | None = None


def train_elastically(setup: Setup, member: Member, open_folder: Callable[[str], RunFolder]) -> str:
    """Train like `common.training.loop.train` while workers come and go; return "finished" or "interrupted".

    open_folder: called with the agent's start where this process becomes rank 0
    """
    config, recorder = setup.config, setup.recorder
    length = lengths(setup.task, config, setup.device)
    held = Held()
    gc.freeze()  # groups are collected at each change: without what was imported that takes a tenth of the time
    with (
        Interruption(setup.device, config.logging.every, member.wish) as interruption,
        Trace(config.run_dir, member.number, config.profile) as trace,
    ):
        while True:
            try:
                membership = member.next(held.report, lambda: interruption.asked)
            except DismissedError as dismissal:
                print(f"rank {member.number}: {dismissal}", file=sys.stderr, flush=True)
                return "finished" if held.report.clock == length.steps else "interrupted"
            stage, lost = None, False
            try:
                stage = enter(setup, member, membership, held, length, open_folder)
                with step_named(recorder):
                    status = pursue(stage, membership, length, interruption, trace)
                if status is not None:
                    return status
            except PeerError:
                lost = True
                abort_groups()
            interruption.end_stage()
            held = leave(stage, lost) if stage is not None else Held(held.report._replace(lost=True), held.state)
            stage = None
            recorder.release()
            member.disconnect(lost)


def enter(
    setup: Setup,
    member: Member,
    membership: Membership,
    held: Held,
    length: Length,
    open_folder: Callable[[str], RunFolder],
) -> Stage:
    """Connect with the other members and go on with the state that this worker holds, or with a copy of another's.

    Raises PeerError if that fails: somebody else was lost meanwhile.
    """
    recorder = setup.recorder
    try:
        rank = member.connect(membership, setup.config.parallel.timeout_s)
        folder = open_on_first(lambda: recorder.folder or open_folder(membership.start))
        if folder is not recorder.folder:
            recorder.take_over(folder)
        per_worker = setup.config.ranks_per_worker
        before, holders, members = (
            workers_of(ranks, per_worker) for ranks in (membership.before, membership.holders, membership.members)
        )
        setup = replace(setup, rank=rank, folder=folder)
        found = None if membership.holders else setup.checkpoints.load(setup.device, setup.tell)
        anew = found is None and not membership.holders
        stage = begin_stage(setup, members, length, membership.dealing, anew)
        (worker,) = stage.workers
        worker.model.survive(abort_groups)
        if not membership.holders:
            stage.session.resume(found, list)
            recorder.begin(stage.workers, length.steps, stage.setup.config)
        else:
            if held.state is not None:
                stage.session.load([kept(held.state, membership.clock, membership.dealing)])
            recorder.begin(stage.workers, length.steps, stage.setup.config)
            agree(stage, membership)
            share(stage, member, membership)
            follow(worker, stage.setup.config, membership.clock)
        hosts = gather_objects(socket.gethostname())
        if folder is not None:
            folder.record_hosts(hosts)
        if membership.holders:
            recorder.tell_change(
                before,
                holders,
                members,
                stage.setup.config.topology.name,
                membership=membership.number,
                reports={number // per_worker: report for number, report in membership.reports.items()},
            )
    except CheckpointError:
        raise
    except RuntimeError as error:
        print(f"rank {member.number}: membership {membership.number} failed: {error}", file=sys.stderr, flush=True)
        abort_groups()
        raise PeerError(str(error)) from error
    return stage


def agree(stage: Stage, membership: Membership) -> None:
    """After a loss, give the ranks of a worker what the first of them has, but for their buffers.

    Their random numbers begin anew: one may have drawn those of an update that another gave up.
    """
    (worker,), rank, per_worker = stage.workers, stage.setup.rank, stage.setup.config.ranks_per_worker
    first = rank // per_worker * per_worker
    if per_worker == 1 or not membership.lost or membership.members[rank] not in membership.holders:
        return
    worker.streams[0].draw_anew()
    own = worker.state_dict()
    if rank == first:
        for other in range(first + 1, first + per_worker):
            send_object({key: own[key] for key in REPLICATED}, other)
        return
    state = receive_object(first)
    state["model"] |= {name: own["model"][name] for name, _ in worker.model.named_buffers() if name in own["model"]}
    stage.session.load([own | state])


def share(stage: Stage, member: Member, membership: Membership) -> None:
    """Give the members without a state a copy of a neighbour's."""
    (worker,), recorder = stage.workers, stage.setup.recorder
    per_worker = stage.setup.config.ranks_per_worker
    holders = workers_of(membership.holders, per_worker)
    for joining in membership.members:
        if joining in membership.holders:
            continue
        donor = donor_of(joining // per_worker, holders) * per_worker + joining % per_worker
        if member.number == donor:
            states = {"worker": worker.state_dict(), "recorder": recorder.state_dict()}
            send_object(states, membership.members.index(joining))
        elif member.number == joining:
            states = receive_object(membership.members.index(donor))
            stage.session.load([copied(states["worker"])])
            recorder.load_state_dict(states["recorder"])


def pursue(
    stage: Stage, membership: Membership, length: Length, interruption: Interruption, trace: Trace
) -> str | None:
    """Train until the run ends, and return how; or None once all members have stopped so that somebody can join."""
    session, recorder, (worker,) = stage.session, stage.setup.recorder, stage.workers
    status = "interrupted"
    if membership.last:
        session.save()
    else:
        if membership.lost and recorder.clock:  # what the loss may have prevented
            if length.evaluates(recorder.clock):
                session.evaluate()
            if length.saves(recorder.clock):
                session.save()
        if not train_stage(stage, length, interruption, trace):
            worker.model.close()
            gather_objects(None)  # nobody closes connections that a slower one still uses
            return None
        if recorder.clock == length.steps:
            status = "finished"
    recorder.finish(status)
    worker.model.close()
    return status


def leave(stage: Stage, lost: bool) -> Held:
    """Return what the worker holds when a stage ends; lost: whether peers are gone, so that nobody can be waited for"""
    (worker,) = stage.workers
    merged = worker.model.merged_of_broken
    if lost:
        worker.model.abandon()
    config, clock, (stream,) = stage.setup.config, worker.model.clock, worker.streams
    stream.drawn = clock * config.training.gradient_accumulation  # without batches of an update that was given up
    report = Report(ranks_of(stage.members, config.ranks_per_worker), clock, merged, stream.rest(), lost)
    return Held(report, worker.state_dict())


@explained("handing over the state of a worker")
def send_object(value: dict[str, Any], rank: int) -> None:
    """Send nested dicts, lists and tuples of tensors and plain values to a rank, which calls `receive_object`."""
    file = io.BytesIO()
    torch.save(value, file)
    message = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    dist.send(torch.tensor([message.numel()]), rank)
    dist.send(message, rank)


@explained("taking over the state of a worker")
def receive_object(rank: int) -> dict[str, Any]:
    """Return what that rank sends."""
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, rank)
    message = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(message, rank)
    return torch.load(io.BytesIO(message.numpy().tobytes()), weights_only=True)
