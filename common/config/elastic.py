"""The configuration of `elastic`: workers that leave and join while a run trains."""

import re
from collections.abc import Sequence
from typing import Annotated, Literal, NewType

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from common.config.base import Strict
from common.topology import NAMES

# Ascending numbers that workers, and the ranks of workers, keep from the start of the run. While some are missing,
# positions in the tuple are the workers of the topology, and the ranks of the process group.
Workers = NewType("Workers", tuple[int, ...])
Ranks = NewType("Ranks", tuple[int, ...])


def ranks_of(workers: Workers, per_worker: int) -> Ranks:
    """Return the ranks of these workers; the first rank of worker w is `per_worker` w."""
    return Ranks(tuple(worker * per_worker + index for worker in workers for index in range(per_worker)))


def workers_of(ranks: Ranks, per_worker: int) -> Workers:
    """Return the workers that have all of these ranks."""
    return Workers(tuple(rank // per_worker for rank in ranks[::per_worker]))


class Change(Strict):
    """The workers that leave and join after an update.

    step: number of committed updates
    """

    step: PositiveInt
    leave: list[NonNegativeInt] = Field(default_factory=list)
    join: list[NonNegativeInt] = Field(default_factory=list)


def split(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [IPv6]:PORT. Raises ValueError for anything else."""
    match = re.fullmatch(r"(?:\[([^\[\]\s]+)\]|([^\[\]:\s]+)):([0-9]{1,5})", address)
    if match is None or int(match[3]) > 65535:
        raise ValueError(
            f"{address}: expected HOST:PORT, with a port from 1 to 65535, an IPv6 address in brackets ([fd00::1]:29500)"
        )
    return match[1] or match[2], int(match[3])


def _address(value: str) -> str:
    if split(value)[1] == 0:
        raise ValueError(f"{value}: expected a port from 1 to 65535")
    return value


SURVIVING = {"min_workers": 2, "restarts": 10}  # what elastic=true means


class ElasticConfig(Strict):
    """Changes of a run's workers; on the command line also elastic=true, see SURVIVING, or elastic=false.

    script:      for simulated workers: the changes, in ascending order of their steps
    min_workers: for real workers: when some die, the others continue if they are at least this many and the majority;
                 null: the run ends
    restarts:    how many dead workers are replaced
    agent:       where workers on several hosts find the agent: HOST:PORT of the leading host, which has this address;
                 all hosts run the same command. IPv6: [ADDRESS]:PORT. Spare hosts replace lost ones; null: one
                 host
    keep:        what stays the same when workers leave or join: each worker's batch, or the global batch, as far as it
                 divides evenly
    fallback:    topology to use when the configured one does not exist for the remaining number of workers
    groups:      how members connect after a change: through new process groups, or reconfigured ones (torch >= 2.14);
                 auto: reconfigured where torch can
    """

    script: list[Change] = Field(default_factory=list)
    min_workers: PositiveInt | None = None
    restarts: NonNegativeInt = 0
    agent: Annotated[str, AfterValidator(_address)] | None = None
    keep: Literal["local_batch", "global_batch"] = "local_batch"
    fallback: Literal[NAMES] = "one_peer_exponential"
    groups: Literal["auto", "new", "reconfigured"] = "auto"

    @property
    def key(self) -> str | None:
        """The key by which workers may leave and join, None if they never do."""
        if self.min_workers is not None:
            return f"elastic.min_workers={self.min_workers}"
        return "elastic.script" if self.script else None

    def members(self, count: int, step: int) -> Workers:
        """Return the workers that train after `step` updates, out of `count` workers at the beginning.

        Raises ValueError for a change that is not possible.
        """
        members, before = set(range(count)), 0
        for index, change in enumerate(self.script):
            if step < change.step:
                break
            where = f"elastic.script.{index}"
            if change.step <= before:
                raise ValueError(f"{where}.step={change.step}: expected a step after {before}")
            _expect(f"{where}.leave", change.leave, members, "workers that train then")
            _expect(f"{where}.join", change.join, set(range(count)) - members, "workers that do not train then")
            before = change.step
            members = (members - {*change.leave}) | {*change.join}
            if not members:
                raise ValueError(f"{where}.leave={list(change.leave)}: expected at least one worker to stay")
        return Workers(tuple(sorted(members)))


def _expect(key: str, named: Sequence[int], possible: set[int], which: str) -> None:
    if len(set(named)) < len(named) or not {*named} <= possible:
        raise ValueError(f"{key}={list(named)}: expected each once, and among {which}, {sorted(possible)}")
