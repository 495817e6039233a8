"""The contract that all data-parallel wrappers share: what a user of DDP expects, and the hooks of `optimizer.step()`.

An update is, in this order: `_before_update`, the optimizer's step, `_after_update`, a tick of the clock,
`_after_commit`.
"""

import contextlib
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from common.arguments import check_arguments
from common.parallel.averaging import restored
from common.parallel.bare import Bare
from common.parallel.collectives import Place, meet
from common.parallel.counters import CommunicationCounters
from common.parallel.optimizers import LateBackward, OutsideParameters, warn_of_clock
from common.torch_internals import DDP_OWN_BUFFERS, disable_dynamo, open_groups

OPEN: weakref.WeakSet["DataParallel"] = weakref.WeakSet()  # wrappers that are ready and not closed


class DataParallel(Bare, ABC):
    """A replica of `module`, trained by worker number `worker` of `world_size` workers.

    Names are the bare module's everywhere: `state_dict()`, `named_parameters()`, `named_modules()` carry no prefix.
    One *update* is one `step()` of every attached optimizer; `clock` counts the updates committed. `everyone` is the
    process group of all ranks, whose collectives fail after the model's `timeout_s`; None: the default group, or a
    single process. `is_averaged` tells whether the parameters are the mean, inside `averaged()`.
    """

    def __init__(
        self, module: nn.Module, worker: int, world_size: int, everyone: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(module)
        self.worker = worker
        self.world_size = world_size
        self.everyone = everyone
        self.clock = 0
        self.counters = CommunicationCounters()
        self._optimizers: list[Optimizer] = []
        self._stepping: set[int] = set()
        self._stepped: set[int] = set()
        self.is_averaged = self._closed = False
        self._loaded = False  # whether a state dict was loaded, and no clock after it
        # What workers keep in common, in gradients or parameters: the parameters trained when the module is wrapped.
        self._common = {p for p in module.parameters() if p.requires_grad}
        self._late = LateBackward(())
        self._outside = OutsideParameters(said=(world_size if everyone is None else everyone.size()) == 1)
        self._handles: list[RemovableHandle] = []
        self.__dict__["_ddp"] = None  # kept out of the module tree: its parameters are the module's own

    def holds_any(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether workers keep any of these in common."""
        return not self._common.isdisjoint(parameters)

    def _average_gradients(self, group: dist.ProcessGroup, **options: Any) -> None:
        """Make DDP average gradients over `group`; buffers stay local to each rank."""
        self.__dict__["_ddp"] = DistributedDataParallel(
            self.module, process_group=group, gradient_as_bucket_view=True, **DDP_OWN_BUFFERS, **options
        )

    # -- defined by each method of data parallelism

    def _before_forward(self) -> None:
        """Prepare a training forward."""

    def _before_update(self) -> None:
        """Act before the first optimizer's step of an update."""

    def _after_update(self) -> None:
        """Act after the last optimizer's step of an update, before the clock ticks."""

    def _after_commit(self) -> None:
        """Act after the clock ticked."""

    def _meet(self, place: Place) -> None:
        """Check, before a collective operation, that all ranks are at the same point."""
        if self.everyone is not None:
            meet(place, self.everyone)

    @property
    def _connected(self) -> bool:
        """Whether this rank can still wait for others: there are groups, and they have not been destroyed."""
        return self.everyone is None or self.everyone in open_groups()

    def _drain(self) -> None:
        """Make sure that no message is in flight, and let an interrupted update start over."""

    def _reshard(self) -> None:
        """Drop gathered copies of sharded parameters: the shards are about to be written."""

    @abstractmethod
    def _mean_state(self) -> list[Tensor]:
        """Return what `averaged` overwrites: parameters that may differ between workers, and buffers."""

    @abstractmethod
    def _write_mean(self) -> None:
        """Replace `_mean_state` by its mean over all workers, in place. Collective."""

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Hold the mean model inside a block: evaluate it in `with model.averaged() as module:`.

        Inside, the trainable parameters and the persistent floating point buffers (BatchNorm statistics) are the
        mean over all workers; afterwards they are what they were, bit for bit. Training inside is refused; a graph's
        forward and backward belong on the same side of the block. A state dict taken inside refers to the parameters,
        as everywhere in PyTorch: save it inside, or copy its tensors. A nested block changes nothing. Collective.
        """
        if self.is_averaged:
            yield self.module
            return
        self._begin("averaged()")
        with restored(self.bare_module, self._mean_state()):
            self._write_mean()
            torch.clear_autocast_cache()  # of an autocast around the block
            self.is_averaged = True
            try:
                yield self.module
            finally:
                self.is_averaged = False
                self._reshard()

    @abstractmethod
    def average_(self) -> None:
        """Replace parameters and buffers by their mean over all workers, for good. Collective."""

    @abstractmethod
    def consensus_distance(self) -> float:
        """Return sqrt(mean_i ||x_i - x_bar||^2) over the trainable parameters, equal on all ranks. Collective."""

    def check_peers(self) -> None:
        """Raise PeerError after an update that had to do without some of the peers."""

    def synchronize_gradients(self) -> None:
        """Make gradients final after the last backward of a step; a no-op where backward has done it."""

    @property
    def settles_in_first_backward(self) -> bool:
        """Whether the first backward fixes the order in which gradients are added up from then on, as DDP's does."""
        return self._ddp is not None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients locally: wrap all but the last backward of a step. Only matters where DDP averages."""
        return self._ddp.no_sync() if self._ddp is not None else contextlib.nullcontext()

    def drain(self) -> None:
        """Make sure that no message is in flight, so that parameters may be written. Collective."""
        self._drop("drain()")

    def communication_state(self) -> dict[str, Tensor]:
        """Return what the next rounds depend on besides parameters and clock, for the checkpoint of this rank."""
        return {}

    def load_communication_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `communication_state()`. Collective: drains first.

        Raises ValueError if its names or sizes differ, as with other communication options.
        """
        self._drop("load_communication_state()")
        own = self.communication_state()
        expected, got = ({name: tensor.numel() for name, tensor in tensors.items()} for tensors in (own, state))
        if expected != got:
            raise ValueError(
                f"communication state: expected {expected or 'nothing'}, got {got or 'nothing'} (names and numbers of "
                "elements): was message_dtype, local_steps or outer another one?"
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def close(self) -> None:
        """Drain, detach from the optimizers, and destroy the process groups made for this wrapper. Collective.

        The bare module and the optimizers stay usable. While an exception is handled, and after
        `destroy_process_group()`, it waits at most a few seconds for messages in flight, and never raises. If ranks are
        out of step it raises like other collective methods, but closes all the same.
        """
        if self._closed:
            return
        waits, clean = self._connected and sys.exc_info()[0] is None, False
        try:
            if waits:
                self._begin("close()")
                self._drain()
                clean = True
        finally:
            self._release(clean, patient=not waits)

    def _release(self, clean: bool, patient: bool) -> None:
        """Detach from the optimizers and from the peers.

        clean:   nothing is in flight and all is well
        patient: if not clean, whether messages in flight may still arrive
        """
        self._closed = True
        OPEN.discard(self)
        for handle in self._handles:
            handle.remove()
        self._optimizers.clear()
        self.__dict__["_ddp"] = None

    def _begin(self, operation: str) -> None:
        """Check that a collective operation is allowed now, and that all ranks are at the same point.

        Raises RuntimeError inside `averaged()` and after `close()`, or PeerError naming the ranks that differ.
        """
        if self.is_averaged:
            raise RuntimeError(
                f"{operation} inside `with model.averaged()`: leave the block first, at whose end the worker's own "
                "parameters come back"
            )
        if self._closed:
            raise RuntimeError(f"{operation} after close(): wrap model.module anew")
        self._meet(Place(operation, self.clock, (), self._interrupted))

    def _drop(self, operation: str) -> None:
        """Drain, as part of a collective operation; a no-op after `close()`, when nothing is in flight."""
        if not self._closed:
            self._begin(operation)
            interrupted = self._interrupted
            self._drain()
            if interrupted:
                self._stepping.clear()
                self._stepped.clear()

    # -- the optimizer's hooks

    def attach(self, optimizer: Optimizer) -> Optimizer:
        """Attach to `optimizer.step()`; call it once for each optimizer of the module, after wrapping.

        Raises ValueError if it is no optimizer, holds none of the module's parameters, or is attached already, and
        RuntimeError inside `averaged()` and after `close()`.
        """
        check_arguments(DataParallel.attach, locals())
        self._begin("attach()")
        own = {id(parameter) for parameter in self.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "attach: the optimizer holds none of this module's parameters; build it from model.parameters()"
            )
        if any(other is optimizer for other in self._optimizers):
            raise ValueError("attach: this optimizer is attached already")
        key = id(optimizer)
        self._optimizers.append(optimizer)
        self._handles += [
            optimizer.register_step_pre_hook(lambda *_: self._pre_step(key)),
            optimizer.register_step_post_hook(lambda *_: self._post_step(key)),
        ]
        return optimizer

    @disable_dynamo
    def _pre_step(self, key: int) -> None:
        if self.is_averaged:
            raise RuntimeError("optimizer.step() inside `with model.averaged()`: the mean model is for evaluation")
        if self._interrupted:
            raise RuntimeError(self._way_on("an optimizer's step"))
        if key in self._stepped:
            raise RuntimeError(
                f"an optimizer stepped twice before all {len(self._optimizers)} attached ones stepped once: "
                "an update is one step of every attached optimizer"
            )
        if self._loaded and self.clock == self.worker == 0:
            warn_of_clock(self._optimizers)
        self._loaded = False
        self._late.look(first=not self._stepping)
        self._stepping.add(key)
        if len(self._stepping) == 1:
            self._before_update()
            self._outside.look(self, self._optimizers, self._common)

    @disable_dynamo
    def _post_step(self, key: int) -> None:
        self._stepped.add(key)
        if len(self._stepped) < len(self._optimizers):
            return
        self._after_update()
        self._stepping.clear()
        self._stepped.clear()
        self.clock += 1
        self._after_commit()

    def load_clock(self, clock: int) -> None:
        """Continue after `clock` committed updates (when resuming). Collective: drains first."""
        check_arguments(DataParallel.load_clock, locals())
        if clock < 0:
            raise ValueError(f"clock={clock}: expected the number of committed updates, >= 0")
        self._drop(f"load_clock({clock})")
        self._stepping.clear()
        self._stepped.clear()
        self._loaded = False
        self.clock = int(clock)  # numpy's integers are not for torch.load(weights_only=True)

    # -- forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        if self.training and torch.is_grad_enabled():
            self.before_forward()
        return (self._ddp or self.module)(*args, **kwargs)

    @disable_dynamo
    def before_forward(self) -> None:
        """Check that a training forward is allowed now, and prepare it; `forward` calls this itself."""
        if self.is_averaged:
            raise RuntimeError("a training forward inside `with model.averaged()`: call model.eval() or no_grad()")
        if not self._optimizers:
            raise RuntimeError(
                "a training forward, but no optimizer is attached: call model.attach(optimizer); one that trains "
                "nothing, such as a summary or a learning-rate test, can be run on model.module or under no_grad()"
            )
        if self._interrupted:
            raise RuntimeError(self._way_on("a training forward"))
        if self._stepping:
            raise RuntimeError(
                "a training forward inside an update: run every forward and backward of a step first, then step "
                f"all {len(self._optimizers)} attached optimizers"
            )
        self._before_forward()

    @property
    def _interrupted(self) -> bool:
        """Whether an optimizer's step, or the end of an update, has begun and is not over."""
        return self._stepping != self._stepped or 0 < len(self._optimizers) == len(self._stepped)

    def _way_on(self, what: str) -> str:
        return (
            f"{what} inside an update, number {self.clock}, whose optimizer.step() is not over: expected steps without "
            "closures or calls of super().step(). If an exception interrupted it: on every rank load a checkpoint "
            "(load_state_dict, load_clock), or call drain() to begin the update anew from the parameters as they are"
        )

    def _before_load(self) -> None:
        self._drop("load_state_dict()")

    def _after_load(self) -> None:
        self._loaded = True
