"""Hands exchanges to the network, and carries those of several stages on while the model computes."""

import contextlib
import queue
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch

from common.parallel.transport import Exchange
from common.parallel.turns import Turns

STAGES = 3  # the most that an exchange has


class Network:
    """Posts exchanges, in the same order on all ranks.

    What lies on the CPU travels by gloo: every receive is posted before any send; stage k of all exchanges is run, in
    order, by a thread of its own, so that the stages of different buckets overlap. Between hosts rounds take turns. On
    GPUs (NCCL) the messages of an exchange are one batch and its stages are put on a side stream: the host does not
    wait. The device decides, not the process group's backend, which has no name of its own where it was left to
    PyTorch.

    timeout: what a stage may wait for its peers
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._queues: list[queue.SimpleQueue[Exchange | None]] = []
        self._stream: torch.cuda.Stream | None = None
        self._turns = Turns()

    def post(self, exchanges: Sequence[Exchange]) -> None:
        """Hand them to the network: receives first, then sends."""
        for exchange in exchanges:
            if exchange.chunk.is_cuda:
                self._post_batch(exchange)
        on_cpu = [exchange for exchange in exchanges if not exchange.chunk.is_cuda]
        pending = [(exchange, op) for exchange in on_cpu for op in exchange.receives()]
        for exchange, op in pending:
            exchange.post([op])
        for exchange in on_cpu:
            for op in exchange.start():
                exchange.post([op])
            if exchange.stages:
                self._submit(exchange)

    def close(self) -> None:
        """End the threads. Nothing may be in flight."""
        for line in self._queues:
            line.put(None)
        self._queues.clear()

    def _post_batch(self, exchange: Exchange) -> None:
        with self._side_stream(exchange):
            exchange.post(exchange.receives() + exchange.start())
            for index in range(len(exchange.stages)):
                exchange.run_stage(index, self._timeout)
        exchange.staged.set()

    def _side_stream(self, exchange: Exchange) -> contextlib.AbstractContextManager[None]:
        if not exchange.stages:
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(exchange.chunk.device)
        self._stream.wait_stream(torch.cuda.current_stream())  # the parameters as they are now
        exchange.stream = self._stream
        return torch.cuda.stream(self._stream)

    def _submit(self, exchange: Exchange) -> None:
        if not self._queues:
            self._queues = [queue.SimpleQueue() for _ in range(STAGES)]
            for index in range(STAGES):
                # Daemons: a process that gives up does not wait for a peer that will never answer.
                threading.Thread(
                    target=self._run, args=(index, list(self._queues)), name=f"gossip-stage-{index}", daemon=True
                ).start()
        if exchange.between_hosts:
            self._turns.enter(exchange.turn)
        self._queues[0].put(exchange)

    def _run(self, index: int, queues: list[queue.SimpleQueue]) -> None:
        while (exchange := queues[index].get()) is not None:
            if exchange.between_hosts and index == exchange.between_hosts[0]:
                self._turns.wait(exchange.turn)
            exchange.run_stage(index, self._timeout)
            if exchange.between_hosts and index == exchange.between_hosts[-1]:
                self._turns.leave(exchange.turn)
            if index + 1 < len(exchange.stages):
                queues[index + 1].put(exchange)
            else:
                exchange.staged.set()
