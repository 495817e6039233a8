"""The training loop of a real worker that outlives others, or takes the place of one that died.

Each membership (`common.elastic.membership`) has its own process groups, wrapper and optimizer, built around the state
that the worker has in memory. After a loss all continue from the largest number of committed updates: a worker that is
behind skips the updates that it missed, with their batches. The membership row of metrics.jsonl records which buckets
each worker has merged in the round that broke, so that the run can be replayed bit for bit.

The ranks of a worker may have reached different points: they continue with the state of the first. A rank whose
average of gradients broke gives up the update.
"""

import gc
import io
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from common.config.elastic import ranks_of, workers_of
from common.elastic.membership import DismissedError, Member, Membership, Report
from common.interruptible import heard_alone
from common.parallel.collectives import PeerError, explained, gather_objects, sendable
from common.record.checkpoint import CheckpointError
from common.record.run_folder import RunFolder, open_on_first
from common.training.interruption import Interruption, Request
from common.training.loop import step_named, train_until
from common.training.members import copied, donor_of, follow, kept
from common.training.run import Run
from common.training.timing import Trace
from common.training.worker_group import WorkerGroup

REPLICATED = ("model", "communication", "optimizer", "schedule", "scaler")  # of a worker's state, alike on its ranks


class Held(NamedTuple):
    """What a rank has when it leaves a membership: its report and the worker's state."""

    report: Report = Report()
    state: dict[str, Any] | None = None


def train_elastically(run: Run, member: Member, open_folder: Callable[[str], RunFolder]) -> str:
    """Train like `common.training.loop.train` while workers leave and join; return "finished" or "interrupted".

    open_folder: called with the agent's start if this process becomes rank 0
    """
    held = Held()
    gc.freeze()  # groups are collected at each change: without imported objects that takes a tenth of the time
    with (
        Interruption(run.device, run.config.logging.every, member.request) as interruption,
        heard_alone(),
        Trace(run.config.run_dir, member.number, run.config.profile) as trace,
    ):
        while True:
            try:
                membership = member.next(held.report, lambda: interruption.asked)
            except DismissedError as dismissal:
                print(f"rank {member.number}: {dismissal}", file=sys.stderr, flush=True)
                return "finished" if held.report.clock == run.timetable.steps else "interrupted"
            group, lost = None, False
            try:
                group = join(run, member, membership, held, open_folder)
                with step_named(run.recorder):
                    status = train_membership(group, membership, interruption, trace)
                if status is not None:
                    return status
            except Exception as error:
                if not isinstance(error, PeerError) and not member.groups.aborted():
                    raise
                lost = True
                member.groups.abort()
            interruption.reset()
            held = leave(group, lost) if group is not None else Held(held.report._replace(lost=True), held.state)
            group = None
            run.recorder.release()
            member.disconnect(lost)


def join(
    run: Run, member: Member, membership: Membership, held: Held, open_folder: Callable[[str], RunFolder]
) -> WorkerGroup:
    """Connect to the other members and continue with the state that this rank holds, or with a copy of another's.

    Raises PeerError if that fails because another rank was lost meanwhile.
    """
    try:
        rank = member.connect(membership, run.config.parallel.timeout_s)
        folder = open_on_first(lambda: run.recorder.folder or open_folder(membership.start))
        if folder is not run.recorder.folder:
            run.recorder.take_over(folder)
        group = restore(replace(run, rank=rank), member, membership, held)
        hosts = gather_objects(socket.gethostname())
        if folder is not None:
            folder.record_hosts(hosts)
        if membership.holders:
            per_worker = run.config.ranks_per_worker
            run.recorder.tell_change(
                workers_of(membership.before, per_worker),
                workers_of(membership.holders, per_worker),
                group.members,
                group.config.topology.name,
                membership=membership.number,
                reports={number // per_worker: report for number, report in membership.reports.items()},
            )
    except CheckpointError:
        raise
    except RuntimeError as error:
        print(f"rank {member.number}: membership {membership.number} failed: {error}", file=sys.stderr, flush=True)
        member.groups.abort()
        raise PeerError(str(error)) from error
    return group


def restore(run: Run, member: Member, membership: Membership, held: Held) -> WorkerGroup:
    """Return the group of this rank's worker with its state: at first a new one or a checkpoint's, then from memory."""
    found = None if membership.holders else run.checkpoints.load(run.device, run.tell)
    anew = found is None and not membership.holders
    members = workers_of(membership.members, run.config.ranks_per_worker)
    group = WorkerGroup(run, members, membership.dealing, anew)
    (worker,) = group.workers
    worker.model.survive(member.groups.abort, member.groups.aborted)
    if not membership.holders:
        group.resume(found)
    elif held.state is not None:
        group.load([kept(held.state, membership.clock, membership.dealing)])
    run.recorder.begin(group.workers, run.timetable.steps, group.config)
    if membership.holders:
        share_with_ranks(group, membership)
        share_with_joining(group, member, membership)
        follow(worker, group.config, membership.clock)
    return group


def share_with_ranks(group: WorkerGroup, membership: Membership) -> None:
    """After a loss, give the ranks of a worker the state of the first, except for their buffers.

    Their random numbers start afresh: one rank may have drawn for an update that another gave up.
    """
    (worker,), rank, per_worker = group.workers, group.run.rank, group.config.ranks_per_worker
    first = rank // per_worker * per_worker
    if per_worker == 1 or not membership.lost or membership.members[rank] not in membership.holders:
        return
    worker.streams[0].draw_anew()
    timeout_s = group.config.parallel.timeout_s
    own = worker.state_dict()
    if rank == first:
        for other in range(first + 1, first + per_worker):
            send_object({key: own[key] for key in REPLICATED}, other, timeout_s)
        return
    state = receive_object(first, timeout_s)
    state["model"] |= {name: own["model"][name] for name, _ in worker.model.named_buffers() if name in own["model"]}
    group.load([own | state])


def share_with_joining(group: WorkerGroup, member: Member, membership: Membership) -> None:
    """Give the members without a state a copy of a neighbour's state."""
    (worker,), recorder = group.workers, group.run.recorder
    per_worker, timeout_s = group.config.ranks_per_worker, group.config.parallel.timeout_s
    holders = workers_of(membership.holders, per_worker)
    for joining in membership.members:
        if joining in membership.holders:
            continue
        donor = donor_of(joining // per_worker, holders) * per_worker + joining % per_worker
        if member.number == donor:
            states = {"worker": worker.state_dict(), "recorder": recorder.state_dict()}
            send_object(states, membership.members.index(joining), timeout_s)
        elif member.number == joining:
            states = receive_object(membership.members.index(donor), timeout_s)
            group.load([copied(states["worker"])])
            recorder.load_state_dict(states["recorder"])


def train_membership(
    group: WorkerGroup, membership: Membership, interruption: Interruption, trace: Trace
) -> str | None:
    """Train until the run ends, and return how; or None once all members have stopped so that another can join."""
    recorder, timetable = group.run.recorder, group.run.timetable
    if membership.last:
        group.save()
    else:
        if membership.lost and recorder.clock:  # what the loss may have prevented
            if timetable.evaluates(recorder.clock):
                group.evaluate()
            if timetable.saves(recorder.clock):
                group.save()
        request = train_until(timetable.steps, group, interruption, trace)
        if request is Request.CHANGE and recorder.clock < timetable.steps:
            group.close()
            gather_objects(None)  # no rank closes connections that a slower one still uses
            return None
    status = "finished" if recorder.clock == timetable.steps and not membership.last else "interrupted"
    recorder.finish(status)
    try:
        gather_objects(None)  # if rank 0 is lost before it has written the summary, another rank does
    except RuntimeError:
        if recorder.folder is None:
            raise
        return status  # the run has ended, whoever is lost now
    group.close()
    return status


def leave(group: WorkerGroup, lost: bool) -> Held:
    """Return what the rank holds when a membership ends; lost: whether peers are gone, so that waiting is futile."""
    (worker,) = group.workers
    merged = worker.model.merged_of_broken
    if lost:
        worker.model.abandon()
    config, clock, (stream,) = group.config, worker.model.clock, worker.streams
    stream.drawn = clock * config.training.gradient_accumulation  # without batches of an update that was given up
    report = Report(ranks_of(group.members, config.ranks_per_worker), clock, merged, stream.rest(), lost)
    return Held(report, worker.state_dict())


@explained("handing over the state of a worker")
def send_object(value: dict[str, Any], rank: int, timeout_s: float) -> None:
    """Send nested dicts, lists and tuples of tensors and plain values to a rank, which calls `receive_object`."""
    file = io.BytesIO()
    torch.save(value, file)
    message = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    for tensor in (torch.tensor([message.numel()]), message):
        dist.isend(sendable(tensor, None), rank).wait(timedelta(seconds=timeout_s))  # gloo's own is for connecting


@explained("taking over the state of a worker")
def receive_object(rank: int, timeout_s: float) -> dict[str, Any]:
    """Return the value that a rank sends with `send_object`."""
    timeout = timedelta(seconds=timeout_s)
    size = sendable(torch.empty(1, dtype=torch.int64), None)
    dist.irecv(size, rank).wait(timeout)
    message = sendable(torch.empty(int(size), dtype=torch.uint8), None)
    dist.irecv(message, rank).wait(timeout)
    return torch.load(io.BytesIO(message.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)
