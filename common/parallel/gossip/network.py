"""Post exchanges, and run the stages of those that have some while the model computes."""

import atexit
import os
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch

from common.parallel.gossip.exchange import Exchange, hand_over
from common.parallel.streams import is_queued

STAGES = 3  # the most that an exchange has
END_S = 10.0  # longest wait for a thread to end
SLACK = 1  # messages of earlier rounds that may still be in flight, so that the link never idles between rounds


_with_threads: "weakref.WeakSet[Any]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_with_threads.clear)  # the threads are the parent's


def end_with_process(thing: Any) -> None:
    """Call `thing.end()`, if alive, before the interpreter ends: threads inside gloo would abort the process."""
    _with_threads.add(thing)


@atexit.register
def _end_all() -> None:
    for thing in list(_with_threads):
        thing.end()


class RoundOrder:
    """Holds messages between hosts back until those of earlier rounds have arrived.

    A bucket's next round may begin while other buckets still wait for this one. If both used the link at once, each
    would get half of it, and the earlier round, which hosts wait for, would end late: with alternating pairs of hosts
    every step then takes half as long again. Earlier rounds never depend on later ones, so this cannot deadlock.

    Plain messages take turns only where several workers share a host's link: there one worker's later round would slow
    down another's earlier one. A link that belongs to one worker can serve the next message while one waits for a late
    peer.
    """

    def __init__(self) -> None:
        self._under_way: Counter[int] = Counter()
        self._changed = threading.Condition()

    def enter(self, turn: int) -> None:
        """Count one more message of round `turn`: from now on later rounds wait for it."""
        with self._changed:
            self._under_way[turn] += 1

    def wait(self, turn: int) -> None:
        """Block until at most SLACK messages of rounds before `turn` are in flight."""
        with self._changed:
            self._changed.wait_for(lambda: self._before(turn) <= SLACK)

    def leave(self, turn: int) -> None:
        """Count one message of round `turn` fewer: it arrived or failed."""
        with self._changed:
            self._under_way[turn] -= 1
            self._under_way += Counter()  # drops what is zero
            self._changed.notify_all()

    def _before(self, turn: int) -> int:
        return sum(count for other, count in self._under_way.items() if other < turn)


class Network:
    """Posts exchanges, in the same order on all ranks.

    On the CPU (gloo) every receive is posted before any send; for each k, one thread runs stage k of all exchanges, in
    order, so that the stages of different buckets overlap. Between hosts rounds take turns. Where the host runs ahead
    of the device (NCCL), exchanges without stages share one batch, because every batch is a separate launch;
    exchanges with stages go to a side stream.

    timeout: how long a stage may wait for its peers
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._queues: list[queue.SimpleQueue[Exchange | None]] = []
        self._threads: list[threading.Thread] = []
        self._stream: torch.cuda.Stream | None = None
        self._order = RoundOrder()

    def post(self, exchanges: Sequence[Exchange]) -> None:
        """Hand exchanges, all on one device, to the network."""
        if exchanges and is_queued(exchanges[0].chunk.device):
            self._put_on_streams(exchanges)
            return
        pending = [(exchange, op) for exchange in exchanges for op in exchange.receives()]
        for exchange, op in pending:
            exchange.post([op])
        for exchange in exchanges:
            for op in exchange.start():
                exchange.post([op])
            if exchange.stages:
                self._submit(exchange)

    def close(self) -> None:
        """End the threads, after the exchanges they already have. Nothing may be in flight that peers do not answer."""
        for first in self._queues[:1]:
            first.put(None)
        for thread in self._threads:
            thread.join(END_S)
        self._queues.clear()
        self._threads.clear()

    def _put_on_streams(self, exchanges: Sequence[Exchange]) -> None:
        plain = {exchange: [*exchange.receives(), *exchange.start()] for exchange in exchanges if not exchange.stages}
        works, failure = hand_over(list(chain(*plain.values())))
        for exchange, ops in plain.items():
            if ops:
                exchange.attach_works(works, failure)
        for exchange in exchanges:
            if exchange.stages:
                self._put_on_side_stream(exchange)

    def _put_on_side_stream(self, exchange: Exchange) -> None:
        device = exchange.chunk.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the parameters as they are now
        with torch.cuda.stream(self._stream):
            exchange.post(exchange.receives() + exchange.start())
            for index in range(exchange.stages):
                exchange.run_stage(index, self._timeout)
        exchange.done = torch.cuda.Event()  # its own: the stream itself also carries what later exchanges wait for
        exchange.done.record(self._stream)

    def _submit(self, exchange: Exchange) -> None:
        if not self._queues:
            self._queues = [queue.SimpleQueue() for _ in range(STAGES)]
            for index in range(STAGES):
                # Daemons: a process that gives up does not wait for a peer that will never answer; see `Mixer.end`.
                thread = threading.Thread(
                    target=self._run, args=(index, list(self._queues)), name=f"gossip-stage-{index}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        if exchange.between_hosts:
            self._order.enter(exchange.turn)
        self._queues[0].put(exchange)

    def _run(self, index: int, queues: list[queue.SimpleQueue]) -> None:
        while (exchange := queues[index].get()) is not None:
            if exchange.between_hosts and index == exchange.between_hosts[0]:
                self._order.wait(exchange.turn)
            exchange.run_stage(index, self._timeout)
            if exchange.between_hosts and index == exchange.between_hosts[-1]:
                self._order.leave(exchange.turn)
            if index + 1 < exchange.stages:
                queues[index + 1].put(exchange)
            else:
                exchange.staged.set()
        for following in queues[index + 1 : index + 2]:
            following.put(None)
