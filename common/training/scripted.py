"""Simulated workers that leave and join after the updates that `elastic.script` names."""

from collections.abc import Mapping
from typing import Any

from common.config.config import Config
from common.config.elastic import Workers
from common.training.members import copied, donor_of, follow, kept
from common.training.stream import Dealing
from common.training.worker_group import WorkerGroup


def next_change(config: Config, clock: int) -> int | None:
    """Return after which update the members change next; None if they stay."""
    return next((change.step for change in config.elastic.script if change.step > clock), None)


def with_scripted_members(group: WorkerGroup) -> WorkerGroup:
    """Return the group of the workers that train now: the same, or one that goes on in its place after a change."""
    run, before = group.run, group.members
    after = run.config.elastic.members(run.config.n, run.recorder.clock)
    if after == before:
        return group
    dealing = group.workers[0].streams[0].rest()
    states = states_after(group, after, dealing)
    following = WorkerGroup(run, after, dealing)
    run.recorder.change(before, after, following.config.topology.name)
    group.close()
    following.load(states)
    for worker in following.workers:
        follow(worker, following.config, worker.model.clock)
    run.recorder.begin(following.workers, run.timetable.steps, following.config)
    return following


def states_after(group: WorkerGroup, after: Workers, dealing: Dealing) -> list[Mapping[str, Any]]:
    """Return the state with which each worker after the change begins; dealing: where the data go on."""
    states = {number: worker.state_dict() for number, worker in zip(group.members, group.workers, strict=True)}
    return [
        kept(states[number], states[number]["clock"], dealing)
        if number in states
        else copied(states[donor_of(number, group.members)])
        for number in after
    ]
