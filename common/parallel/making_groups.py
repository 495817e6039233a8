"""Make process groups: as torch does, or, for a changing membership, as new groups or by c10d's `reconfigure`.

If a peer dies while groups connect, gloo waits for it for five times the group's timeout, and nothing can interrupt
that. So the members first wait for each other in the store, which can be interrupted, and then connect with a short
timeout.
"""

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common.torch_internals import (
    backend_of,
    can_reconfigure,
    open_groups,
    reconfigurable_group,
    reconfigure,
    reconfigure_handle,
    restart_group_names,
    set_group_timeout,
)

UNUSED_TAG = 1 << 30  # no message has it: their tags are smaller, see `common.parallel.gossip.exchange.tag_of`
LONGEST_CONNECT = timedelta(seconds=5)
CONNECT_SHARE = 1 / 8  # of a membership's timeout: five times that still leaves time to report


class TorchGroups:
    """Groups as torch makes them, for a program whose ranks stay the same."""

    def new(self, ranks: Sequence[int] | None, timeout: timedelta) -> Any:
        """Return a group of these ranks (None: of all), NON_GROUP_MEMBER to others. Collective."""
        return dist.new_group(ranks, timeout=timeout)

    def close(self, group: dist.ProcessGroup) -> None:
        """Destroy a group, unless `destroy_process_group()` has done so already."""
        if group in open_groups():
            dist.destroy_process_group(group)


class NewGroups(TorchGroups):
    """Groups that are made anew for each membership, with any version of torch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # connections are not closed while groups are taken down, or reconfigured

    def open(self, store: dist.Store, number: int, rank: int, size: int, timeout: timedelta) -> None:
        """Open the default group of a membership by its store. Raises RuntimeError if a member is lost meanwhile."""
        self._connect = min(LONGEST_CONNECT, timeout * CONNECT_SHARE)
        store.set(f"here/{rank}", "")
        store.wait([f"here/{other}" for other in range(size)])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=self._connect)
        set_group_timeout(timeout, dist.group.WORLD)

    def new(self, ranks: Sequence[int] | None, timeout: timedelta) -> Any:
        """Return a group of these ranks (None: of all), NON_GROUP_MEMBER to others. Collective."""
        group = dist.new_group(ranks, timeout=self._connect)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            set_group_timeout(timeout, group)
        return group

    def abort(self) -> None:
        """Make every wait for peers raise, in any thread."""
        with self._lock:
            abort_groups()

    def aborted(self) -> bool:
        """Return whether groups were aborted without any wait raising; messages that have arrived may then be torn."""
        return False

    def end(self) -> None:
        """Destroy all groups; no peer expects anything from them any more."""
        with self._lock:
            if dist.is_initialized():
                dist.destroy_process_group()
            restart_group_names()  # they count failed groups too, which other ranks lack


class ReconfiguredGroups(NewGroups):
    """Groups that stay while their ranks change, by c10d's `reconfigure` (torch >= 2.14).

    A failed attempt can leave some ranks of a group reconfigured and others not. So each attempt has its own number,
    unique in the run, under which the members put their handles into the store.

    process: number of this process, different from every other member's
    """

    def __init__(self, process: int, device: torch.device) -> None:
        super().__init__()
        self._process, self._device = process, device
        self._backend = "gloo" if device.type == "cpu" else "nccl"
        self._store = MembershipStore()
        self._free: list[dist.ProcessGroup] = []
        self._used: list[dist.ProcessGroup] = []

    def open(self, store: dist.Store, number: int, rank: int, size: int, timeout: timedelta) -> None:
        """Open the default group, or reconfigure it. Raises RuntimeError if a member is lost meanwhile."""
        self._store.current = store
        self._connect = min(LONGEST_CONNECT, timeout * CONNECT_SHARE) if self._backend == "gloo" else timeout / 2
        self._free += self._used
        self._used.clear()
        self._uuid = number << 16
        if not dist.is_initialized():
            dist.init_process_group(
                self._backend,
                store=self._store,
                rank=self._process,
                world_size=self._process + 1,
                timeout=timeout,
                enable_reconfigure=True,
            )
        self._reconfigure(dist.group.WORLD, range(size), rank)

    def new(self, ranks: Sequence[int] | None, timeout: timedelta) -> Any:
        """Return a group of these ranks (None: of all), NON_GROUP_MEMBER to others. All ranks call it."""
        rank = dist.get_rank()
        ranks = range(dist.get_world_size()) if ranks is None else ranks
        if rank not in ranks:
            self._uuid += 1
            return dist.GroupMember.NON_GROUP_MEMBER
        name = f"reconfigured {self._uuid}"
        group = self._free.pop() if self._free else reconfigurable_group(self._backend, self._store, name, timeout)
        try:
            self._reconfigure(group, ranks, rank)
        except RuntimeError:
            dist.destroy_process_group(group)
            raise
        self._used.append(group)
        return group

    def close(self, group: dist.ProcessGroup) -> None:
        """Keep a group for the next membership."""

    def abort(self) -> None:
        """Make every wait for peers raise, in any thread; waits on a GPU end there instead, see `aborted`."""
        if self._backend == "gloo":
            super().abort()
            return
        with self._lock:
            for group in list(open_groups()):
                with suppress(RuntimeError):  # it has no communicator yet
                    group.abort()  # for reconfigurable groups a revoke, which reconfiguring heals

    def aborted(self) -> bool:
        """Return whether NCCL groups were aborted; messages that have arrived may then be torn."""
        used = [dist.group.WORLD, *self._used] if self._backend == "nccl" and dist.is_initialized() else []
        return any(backend_of(group, self._device).get_error().name != "SUCCESS" for group in used)

    def end(self) -> None:
        """Keep all groups for the next membership."""

    def _reconfigure(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> None:
        self._uuid += 1
        store, key = self._store.current, f"handle/{self._uuid}"
        store.set(f"{key}/{rank}", reconfigure_handle(group))
        handles = [store.get(f"{key}/{other}").decode() for other in ranks]
        with self._lock:
            reconfigure(group, self._uuid, ranks, handles, self._connect)


class MembershipStore(dist.Store):
    """The store of the current membership, for groups that outlive it: a group keeps the store it was made with.

    Ranks may have made their groups in different orders, with different key prefixes; these are dropped.
    """

    current: dist.Store

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        self.current.set(_own(key), value)

    def get(self, key: str) -> bytes:
        """Return a value, once it is set."""
        return self.current.get(_own(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Replace the value if it equals `expected`; return the value after that."""
        return self.current.compare_set(_own(key), expected, desired)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        """Wait until these keys are set."""
        self.current.wait([_own(key) for key in keys], *timeout)


def _own(key: str) -> str:
    """Return the part of a key that is the same on all ranks: "reconfigure/", then a fresh number."""
    return key[key.index("reconfigure/") :]


def groups_of_members(how: str, process: int, device: torch.device) -> NewGroups:
    """Return the maker of a member's groups; how: "new", "reconfigured", or "auto" for what this torch can do.

    process: number of this process, different from every other member's

    Raises ValueError if this torch cannot. Without `reconfigure` nothing ends a wait for a peer on a GPU.
    """
    able, on_cpu = can_reconfigure(device), device.type == "cpu"
    if (how == "reconfigured" and not able) or (not on_cpu and (how == "new" or not able)):
        kind, expected = ("CPUs", "new, or torch 2.14") if on_cpu else ("GPUs", "auto, with torch 2.15")
        raise ValueError(f"elastic.groups={how} on {kind} with torch {torch.__version__}: expected {expected} or later")
    return ReconfiguredGroups(process, device) if able and how != "new" else NewGroups()


def abort_groups(groups: Iterable[dist.ProcessGroup] | None = None) -> None:
    """Close all connections of gloo groups (None: of all in this process), so that no peer gets half a message.

    All waits for peers, in any thread, collectives included, and all later operations raise at once. `abort()` and
    `shutdown()` of a gloo group unblock nothing; a receive that times out closes the pairs of its context, unless the
    pair it waited for was closed already: hence one for each peer. Groups may already have been destroyed.
    """
    for group in list(open_groups() if groups is None else groups):
        for peer in range(group.size()):
            if peer != group.rank():
                with suppress(RuntimeError):
                    backend_of(group, torch.device("cpu")).recv([torch.empty(1)], peer, UNUSED_TAG).wait(
                        timedelta(milliseconds=1)
                    )


current = TorchGroups()  # makes the groups of this process
