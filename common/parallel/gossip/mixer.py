"""The gossip step: launch a round's messages, then merge what arrived.

The parameters x_i(t) do not change between the launch (end of step t-1) and the merge (start of step t). So sends
can read the flat vectors in place, and what is in flight is a function of the parameters and of t alone: a checkpoint
need not contain messages, a resumed run launches the same round again. With local steps the same holds for anchors,
which take the parameters' place.
"""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from common.flat import FlatVector
from common.optim.flat_state import Incoming
from common.options import GossipOptions
from common.parallel.collectives import SKIPPED, PeerError
from common.parallel.counters import CommunicationCounters, region
from common.parallel.gossip.buckets import ScheduledBucket, plan_buckets
from common.parallel.gossip.exchange import Exchange, ReceiveBuffers, tag_of
from common.parallel.gossip.hierarchical import HierarchicalByCollectives, HierarchicalByMessages
from common.parallel.gossip.network import Network, end_with_process
from common.parallel.gossip.point_to_point import SendRecv, SubgroupAllReduce
from common.parallel.gossip.routes import Route, Routes
from common.parallel.process_groups import ProcessGroups
from common.parallel.streams import Stalls, Watch, is_queued
from common.topology import Topology, Transport, in_phases

LAST_WAIT = timedelta(seconds=10)  # for messages that will never be merged


class Mixer:
    """Launches and merges gossip rounds over flat vectors. Every rank calls the same methods in the same order.

    vectors:       the flat vectors of the parameters, the same layout on every rank
    topology:      schedule over workers
    options:       bucket_mb and phases say how to cut the buckets, see `plan_buckets`; each fragment, a run of buckets,
                   has its rounds launched and merged separately
    transport, message_dtype: as in `Routes`; int8 with error feedback, see `messages.py`
    timeout:       how long to wait for a peer
    anchors:       tensors to mix in place of the parameters, laid out like them; empty: the parameters
    """

    def __init__(
        self,
        vectors: Sequence[FlatVector],
        topology: Topology,
        groups: ProcessGroups,
        options: GossipOptions,
        *,
        transport: str,
        message_dtype: torch.dtype | None,
        timeout: timedelta,
        anchors: Sequence[Tensor] = (),
    ) -> None:
        self.vectors = list(vectors)
        device = vectors[0].data.device if vectors else torch.device("cpu")
        queued = is_queued(device)
        fragments = options.fragments
        data = [vector.data for vector in vectors]
        self._mixed = list(anchors) or data
        self.buckets = plan_buckets(data, topology, options.bucket_mb, options.phases, fragments)
        belong = [bucket.fragment for bucket in self.buckets]
        self._fragments = [range(bisect_left(belong, f), bisect_right(belong, f)) for f in range(fragments)]
        self._unit = "step" if options.local_steps == 1 else "round"  # what errors call a round
        # What 8-bit messages have left out so far, laid out like the vectors. Together with parameters and clock this
        # is all that the next round depends on.
        self.errors = [torch.zeros_like(vector.data) for vector in vectors] if message_dtype == torch.int8 else []
        self.strength = 1.0  # of what is merged from now on, see `Exchange`
        # Closes all connections after the first failed exchange, so that the update can be finished without peers;
        # None: a failure is raised.
        self.abort: Callable[[], None] | None = None
        self.aborted: Callable[[], bool] = lambda: False  # whether what has arrived may be torn
        # Number of bucket exchanges that were merged in the update that failed, `mix_now`'s first; the others mix
        # with W = I.
        self.broken: int | None = None
        self._mixed_now = 0  # exchanges by `mix_now` in this update
        self.counters = CommunicationCounters()
        self._groups = groups
        self._routes = Routes(
            in_phases(topology, options.phases), groups, transport, message_dtype, collectives_inside=queued
        )
        if queued:
            groups.warm_up(device)
        self._message_dtype = message_dtype
        self._buffers = ReceiveBuffers()
        self._network = Network(timeout)
        self._timeout = timeout
        # Where the host runs ahead, its clock shows neither how long a wait takes nor that a message is missing.
        self._stalls = Stalls(device) if queued else None
        self._watch = Watch(timeout) if queued else None
        self._in_flight: dict[int, list[Exchange | None]] = {}  # by fragment
        self._launched_at: dict[int, float] = {}
        self._attempt = 0  # how often rounds were dropped, to be launched again
        end_with_process(self)

    @property
    def clock(self) -> int:
        """Number of rounds that the first fragment has merged, the same for all of its buckets between steps."""
        return self.buckets[0].clock if self.buckets else 0

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The fragments whose rounds were launched but not merged yet."""
        return tuple(sorted(self._in_flight))

    def set_clock(self, clock: int, fragment: int | None = None) -> None:
        """Continue from round `clock`, of one fragment or of all; nothing may be in flight."""
        if self.in_flight:
            raise RuntimeError("the topology clock cannot be set while messages are in flight: drain first")
        for bucket in self.buckets:
            if fragment in (None, bucket.fragment):
                bucket.clock = clock

    def launch(self, fragment: int = 0, *, writable: bool = False) -> None:
        """Start sending x(t) for round t of each bucket, unless that was done. What is sent is read in place.

        writable: whether parameters may be written until the merge, as in local steps while their anchors travel

        After a failure that `abort` has contained, nothing more is sent.
        """
        if fragment in self._in_flight or self.broken is not None:
            return
        with region("gossip::launch"):
            indices = self._fragments[fragment]
            self._check(f"gossip launch of {self._unit} {self.clock}")
            self._in_flight[fragment] = [self._exchange(self.buckets[index]) for index in indices]
            self._post(self._in_flight[fragment], first=indices.start)
            self._protect(fragment, writable)

    def merge(self, fragment: int = 0, following: Sequence[Tensor] = ()) -> None:
        """Finish the round in flight (launching it first if need be): x_i <- sum_j W_ij x_j, in place.

        following: tensors laid out like the vectors, to which the change by mixing is added

        Every rank must call it once per round. Afterwards no message of the fragment is in flight and its buckets'
        clocks have ticked. Raises PeerError naming rank, peers, bucket and step when a peer does not answer in time
        (with `abort`: mixes this bucket and all later ones with W = I instead), or RuntimeError naming the parameter
        that was written while its message was in flight.
        """
        self.launch(fragment)
        with region("gossip::merge"):
            indices = self._fragments[fragment]
            self._check(f"gossip merge of {self._unit} {self.clock}")
            if fragment in self._in_flight:  # else an earlier failure kept it from being launched
                self._finish(self._in_flight[fragment], following, first=indices.start)
                self._forget(fragment)
        self._mixed_now = 0
        self.counters.rounds += 1
        self.count_writes()
        for index in indices:
            self.buckets[index].clock += 1

    def arriving(self) -> Iterator[tuple[ScheduledBucket, Incoming | None]]:
        """Yield each bucket when its messages have arrived, and launch its next round when the caller comes back.

        The caller merges `incoming` if that is given (else the bucket is merged already), then updates the bucket's
        slice of the flat vector, then asks for the next one. So the first bucket travels while the last one is updated.
        The whole iteration amounts to `merge`, an update and `launch`, and raises what they raise.
        """
        self.launch()
        with region("gossip::advance"):
            self._check(f"gossip merge of {self._unit} {self.clock}")
            exchanges = self._in_flight[0]  # always what is in flight, even after an exception in the caller
            self._unprotect(0)
            for index, bucket in enumerate(self.buckets):
                exchange, incoming = exchanges[index], None
                if exchange is not None and not self._arrived(index, exchange):
                    exchange = None
                exchanges[index] = None
                if exchange is not None:
                    exchange.strength = self.strength
                    incoming = exchange.incoming()
                    if incoming is None:
                        exchange.merge()
                    self._settle(exchange)
                yield bucket, incoming
                if exchange is not None:
                    exchange.release()  # the next launch takes the same memory
                bucket.clock += 1
                if self.broken is None:
                    exchanges[index] = self._exchange(bucket)
                    self._post(exchanges[index : index + 1], first=index)
            self.counters.rounds += 1
            self.count_writes()
            if self.broken is None:
                self._protect(0, writable=False)
            else:
                del self._in_flight[0]

    def count_writes(self) -> None:
        """Raise the parameters' versions, as writes in place do: autograd then refuses graphs that saved old values."""
        if self._groups.workers > 1:
            torch.autograd.graph.increment_version([p for vector in self.vectors for p in vector.parameters])

    def mix_now(self, vectors: Sequence[Tensor]) -> None:
        """Mix further vectors of the same layout with the matrices of the coming round, blocking; no clock ticks.

        After a failure that `abort` has contained, it does nothing.
        """
        if self.broken is not None:
            return
        begin = time.perf_counter()
        exchanges = [self._exchange(bucket, vectors) for bucket in self.buckets]
        self._post(exchanges)
        self._finish(exchanges)
        self._mixed_now += len(exchanges)
        self.counters.launch_to_merge_s += time.perf_counter() - begin

    def wait(self) -> None:
        """Wait until everything in flight has arrived, and keep it: the vectors may be written if they are restored."""
        for fragment, exchanges in self._in_flight.items():
            for index, exchange in enumerate(exchanges, self._fragments[fragment].start):
                if exchange is not None:
                    self._wait(index, exchange)

    def drain(self) -> None:
        """Wait for what is in flight and drop it, uncounted; the round is launched again later. All ranks call it."""
        self.wait()
        self._attempt += bool(self._in_flight)
        for fragment, exchanges in list(self._in_flight.items()):
            for exchange in filter(None, exchanges):
                exchange.release()
            self._forget(fragment)

    def close(self) -> None:
        """End the threads that run and watch exchanges. Nothing may be in flight."""
        self._network.close()
        if self._watch is not None:
            self._watch.close()

    def end(self, patient: bool = True) -> bool:
        """Close with messages in flight, after an exception or at the end of the process, when peers may never answer.

        Closes gloo's connections, if `patient` after a short wait, so that no thread stays blocked. Returns whether the
        process groups can be destroyed: with NCCL that would wait for messages in flight.
        """
        queued = self._stalls is not None
        if not queued:
            deadline = time.monotonic() + min(self._timeout, LAST_WAIT).total_seconds()
            for exchange in filter(None, chain(*self._in_flight.values())) if patient else ():
                if not exchange.settled(deadline - time.monotonic()):
                    break
            self._groups.abort()
        self._in_flight.clear()
        for vector in self.vectors:
            vector.release()
        self.close()
        return not queued

    def _check(self, where: str) -> None:
        for vector in self.vectors:
            vector.check(where)

    def _protect(self, fragment: int, writable: bool) -> None:
        # In idle rounds and with n = 1 parameters may be written.
        if not writable and any(exchange is not None for exchange in self._in_flight[fragment]):
            for vector in self.vectors:
                vector.protect()
        self._launched_at[fragment] = time.perf_counter()

    def _finish(self, exchanges: Sequence[Exchange | None], following: Sequence[Tensor] = (), first: int = 0) -> None:
        for index, exchange in enumerate(exchanges, first):
            if exchange is not None and self._arrived(index, exchange):
                exchange.strength = self.strength
                before = exchange.chunk.clone() if following else None
                exchange.merge()
                if before is not None:
                    bucket = self.buckets[index]
                    following[bucket.vector][bucket.span].add_(torch.sub(exchange.chunk, before, out=before))
                self._settle(exchange)
                exchange.release()

    def _forget(self, fragment: int) -> None:
        self._unprotect(fragment)
        del self._in_flight[fragment]

    def _unprotect(self, fragment: int) -> None:
        if fragment in self._launched_at:
            self.counters.launch_to_merge_s += time.perf_counter() - self._launched_at.pop(fragment)
        for vector in self.vectors:
            vector.release()

    def _exchange(self, bucket: ScheduledBucket, vectors: Sequence[Tensor] | None = None) -> Exchange | None:
        """Return the exchange of the bucket's next round; None if this worker has no peer in it.

        vectors: what to mix besides the parameters, without error feedback; None: the parameters, or their anchors
        """
        vectors, errors = (self._mixed, self.errors) if vectors is None else (vectors, ())
        route = self._routes.at(bucket.topology, bucket.clock)
        if route is None:
            return None
        chunk = vectors[bucket.vector][bucket.span]
        if route.kind is Transport.SUBGROUP:
            return SubgroupAllReduce(chunk, route, self._buffers)
        error = errors[bucket.vector][bucket.span] if errors else None
        kind = SendRecv
        if route.kind is Transport.HIERARCHICAL:
            kind = HierarchicalByMessages if self._stalls is None else HierarchicalByCollectives
        exchange = kind(chunk, route, self._buffers, self._message_dtype, error)
        exchange.turn, exchange.tag = bucket.clock, tag_of(bucket.clock, self._attempt, bucket.fragment)
        return exchange

    def _post(self, exchanges: Sequence[Exchange | None], first: int = 0) -> None:
        """Post the exchanges of the buckets from number `first` on."""
        self._network.post(list(filter(None, exchanges)))
        if self._watch is not None:
            for index, exchange in enumerate(exchanges, first):
                if exchange is not None:
                    clock = self.buckets[index].clock
                    seconds = self._timeout.total_seconds()
                    self._watch.add(exchange.watched(), partial(self._sentence, index, exchange.route, clock, seconds))

    def _settle(self, exchange: Exchange) -> None:
        exchange.settle()
        # Counted when a message is done, not when it is launched: so a resumed run, which launches the round in
        # flight again, counts like an uninterrupted one.
        self.counters.bytes_sent += exchange.route.bytes_sent(exchange.message_bytes, exchange.shard_bytes)
        self.counters.messages += exchange.route.messages_sent()

    def _arrived(self, index: int, exchange: Exchange) -> bool:
        """Wait for the messages of bucket number `index`; return False where it has to do without them.

        After the first failure connections are closed before anything is written: sends read the vectors in place, and
        no peer may get a mixture of old and new values.
        """
        if self.broken is not None:
            return False
        try:
            self._wait(index, exchange)
        except PeerError:
            if self.abort is None:
                raise
            self.abort()
            if self._stalls is not None:
                torch.cuda.synchronize(exchange.chunk.device)  # until no kernel of a message reads the vectors
            self.broken = self._mixed_now + index
            return False
        return True

    def _wait(self, index: int, exchange: Exchange) -> None:
        begin = time.perf_counter()
        try:
            with self._stalls.measured() if self._stalls is not None else nullcontext():
                exchange.wait(self._timeout)
                if self.abort is not None and self._stalls is not None:  # no stream can go on without a peer
                    torch.cuda.current_stream(exchange.chunk.device).synchronize()
                    if self.aborted():
                        raise RuntimeError("its process groups were aborted")
        except RuntimeError as error:
            clock, waited = self.buckets[index].clock, time.perf_counter() - begin
            raise PeerError(f"{self._sentence(index, exchange.route, clock, waited)} ({error})") from error
        waited = time.perf_counter() - begin if self._stalls is None else self._stalls.passed()
        self.counters.exposed_s += waited

    def _sentence(self, index: int, route: Route, clock: int, waited: float) -> str:
        """Return the error message for bucket number `index` if its round `clock` does not arrive."""
        return (
            f"rank {self._groups.rank}: gossip {self._unit} {clock} failed exchanging with rank(s) "
            f"{list(route.peers)}, bucket {index + 1} of {len(self.buckets)}, after {waited:.1f} s (timeout "
            f"{self._timeout.total_seconds():g} s, topology {self.buckets[index].topology.name}). A peer died, is "
            f"slower than the timeout allows, runs fewer steps (perhaps it {SKIPPED}), or called alone what all ranks "
            "must call, such as drain() or averaged()."
        )
