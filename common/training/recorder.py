"""The records of a run: rows of metrics, a progress bar, a summary. Only rank 0 writes."""

import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from common.config.config import Config
from common.config.elastic import Workers
from common.config.moments import decay_sum, half_lives
from common.parallel.collectives import gather_objects, sum_over_ranks, world_size
from common.record.run_folder import RunFolder
from common.record.sinks import Console, Sinks
from common.training.noise_meter import NoiseMeter
from common.training.task import Task
from common.training.timing import StepClock
from common.training.worker import Worker

MOST_SKIPPED = 100  # steps in a row; halved so often, no loss scale is too large
REMEMBERED_STEPS = 1000  # the last steps, whose median and mean time go into the summary


class DivergedError(RuntimeError):
    """The training loss, or any gradient, is not finite; the message names the step, and for a loss the worker."""


class Recorder:
    """Collects losses, times and evaluations. All ranks make the same calls: some of them sum over ranks.

    folder: where rank 0 writes; None on the other ranks
    """

    def __init__(self, config: Config, task: Task, folder: RunFolder | None) -> None:
        self._config, self._task, self.folder = config, task, folder
        self._last: dict[str, dict[str, Any]] = {}
        self._best: dict[str, Any] | None = None
        self.skipped = self._in_a_row = 0  # steps in which gradients overflowed
        self._losses: list[list[Tensor]] = []  # since the last train row, for each step a loss of each local worker
        self._norms: list[Tensor] = []  # of committed steps
        self._times: list[float] = []
        self._recent = deque[float](maxlen=REMEMBERED_STEPS)
        self._sinks: Sinks | None = None
        self._console: Console | None = None
        self._bytes_of_leavers = 0.0
        self.noise = NoiseMeter()

    def take_over(self, folder: RunFolder | None) -> None:
        """Write to the folder from now on; None: stop writing, as another process is rank 0."""
        if self._sinks is not None:
            self._sinks.close()
        if self.folder is not None:
            self.folder.close()
        self.folder, self._console, self._sinks = folder, None, None

    def begin(self, workers: Sequence[Worker], steps: int, config: Config) -> None:
        """Start or continue the loop with these local workers and their configuration, up to `steps` updates."""
        self._workers, self._steps, self._config = workers, steps, config
        if self._console is None:
            shown = self.folder is not None and config.logging.progress
            self._console = Console(shown, self.clock, steps)
        if self._sinks is None and self.folder is not None:
            self._sinks = Sinks(config, self.folder.run_id, self.folder.kept, self.folder.sent)
        self._device = next(workers[0].model.parameters()).device
        self._losses = [[loss.to(self._device) for loss in step] for step in self._losses]  # from a checkpoint
        self._norms = [norm.to(self._device) for norm in self._norms]
        self._window_exposed = self._exposed_s()
        self._step_clock = StepClock(self._device)
        self.noise.begin(self._task, workers, config)

    def release(self) -> None:
        """Let go of the workers and everything that they hold, until `begin` names others."""
        self._workers = []
        self.noise.release()

    @property
    def clock(self) -> int:
        """Number of committed updates."""
        return self._workers[0].model.clock

    def step(self, committed: bool, losses: Sequence[Tensor], norms: Sequence[Tensor | None]) -> None:
        """Record one pass of the loop; write a train row if one is due.

        Only a row that is due waits for the device and for other ranks. It raises DivergedError if a loss is not
        finite and `training.on_nan=stop`, and where no step in many is committed.
        """
        self._losses.append(list(losses))
        self._step_clock.end_step()
        self._in_a_row = 0 if committed else self._in_a_row + 1
        if self._in_a_row == MOST_SKIPPED:
            wrong = (
                f"gradients were not finite at step {self.clock + 1}, {MOST_SKIPPED} times in a row at any loss scale"
            )
            raise DivergedError(wrong)
        if not committed:
            self.skipped += 1
            return
        self._norms += [norm.double() for norm in norms if norm is not None]
        if self.clock % self._config.logging.every == 0 or self.clock == self._steps:
            self._end_window()

    def _end_window(self) -> None:
        self._write_train_row()
        self._losses, self._norms, self._times = [], [], []
        self._window_exposed = self._exposed_s()
        self.begin_step()

    def begin_step(self) -> None:
        """Begin the next step now: its time excludes whatever followed the last one: an evaluation or a checkpoint."""
        self._step_clock.restart()

    def validation(self, metrics: dict[str, float]) -> bool:
        """Record an evaluation of the mean model; return whether it is the best so far."""
        row = self._row("validation") | metrics | {"bytes_sent": self._bytes_sent()}
        primary = self._task.primary_metric
        sign = 1 if self._task.higher_is_better else -1
        value, former = metrics[primary], self._best[primary] if self._best is not None else math.nan
        best = self._best is None or sign * value > sign * former or (math.isnan(former) and not math.isnan(value))
        if best:
            self._best = row
        self._write(row)
        return best

    def change(self, before: Workers, after: Workers, topology: str) -> None:
        """Record that other workers train from now on; the train row of the former workers ends here."""
        if self._losses:
            self._end_window()
        leaving = [worker for worker, member in zip(self._workers, before, strict=True) if member not in after]
        self._bytes_of_leavers += _sent_by(leaving)
        self.tell_change(before, {*before} & {*after}, after, topology)

    def tell_change(
        self, before: Workers, staying: Collection[int], after: Workers, topology: str, **facts: Any
    ) -> None:
        """Write a row of the workers that left and joined, with further facts; a replaced worker did both."""
        left, joined = sorted({*before} - {*staying}), sorted({*after} - {*staying})
        self._write(self._row("membership") | {"members": list(after), "left": left, "joined": joined} | facts)
        if self.folder is not None:
            who = [f"{verb} {', '.join(map(str, m))}" for verb, m in (("left:", left), ("joined:", joined)) if m]
            self._console.tell(f"step {self.clock}: {'; '.join(who)}; {len(after)} workers train on {topology}")

    def finish(self, status: str) -> None:
        """Write the summary; status: "finished" or "interrupted"."""
        if self._sinks is not None:
            self._sinks.close()
        sent, exposed = self._bytes_sent(), self._exposed_s()
        if self.folder is None:
            return
        summary = {
            "status": status,
            "steps": self.clock,
            "skipped_steps": self.skipped,
            "workers": self._config.n,
            "bytes_sent": sent,
            "consensus_distance": self._last.get("validation", {}).get("consensus_distance"),
            **half_lives(self._config),
            "decay_sum": decay_sum(self._config, self._workers[0].schedule.lr_lambdas[0], self.clock),
            "last": self._last,
            "best": {"validation": self._best},
            "time_step_ms": 1000 * statistics.median(self._recent) if self._recent else None,
            "time_step_ms_mean": 1000 * statistics.fmean(self._recent) if self._recent else None,
            "time_exposed_comm_ms": 1000 * exposed / max(1, self.clock),
        }
        self.folder.finish(summary)
        self._console.close(summary, self.folder.path)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to write the same rows: totals, and the steps since the last row."""
        self._read_times()
        return {
            "last": self._last,
            "best": self._best,
            "skipped": self.skipped,
            "losses": self._losses,
            "norms": self._norms,
            "times": self._times,
            "recent_times": list(self._recent),
            "bytes_of_leavers": self._bytes_of_leavers,
            "noise": self.noise.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._last, self._best, self.skipped = state["last"], state["best"], state["skipped"]
        self._losses, self._norms, self._times = state["losses"], state["norms"], state["times"]
        self._recent.extend(state["recent_times"])
        self._bytes_of_leavers = state["bytes_of_leavers"]
        if "noise" in state:  # older checkpoints have none
            self.noise.load_state_dict(state["noise"])

    def _write_train_row(self) -> None:
        # [steps since the last row, local workers]
        losses = torch.stack([torch.stack(step) for step in self._losses]).double()
        norms = torch.stack(self._norms) if self._norms else self._scalar(math.nan)
        clipped = (norms > (self._config.training.clip or math.inf)).double()
        # One sum over processes and one wait for the device; then means over these steps, workers and processes.
        means = [losses.mean(), norms.mean(), clipped.mean(), *self.noise.sums.flatten()]
        everyone = self._workers[0].model.everyone  # in this group no rank waits for rank 0 to write a model
        sums = sum_over_ranks(torch.stack([*means, self._scalar(self._local_bytes())]), everyone).tolist()
        loss, mean_norm, clipped_fraction, *noise = (value / world_size() for value in sums[:-1])
        self._read_times()
        if not math.isfinite(loss):
            self._diverged(losses)
        row = self._row("train") | {"loss": loss, "lr": self._workers[0].optimizer.param_groups[0]["lr"]}
        if self._norms:
            row |= {"grad_norm": mean_norm, "clipped_fraction": clipped_fraction}
        if self.noise.in_updates:
            row |= self.noise.row(noise)
        if self._workers[0].scaler.is_enabled():  # an overflow halves it
            row["loss_scale"] = min(worker.scaler.get_scale() for worker in self._workers)
        row["bytes_sent"] = round(sums[-1])
        step_s = sum(self._times) / len(self._times)
        row["time_step_ms"] = 1000 * step_s
        speed = self._task.throughput(self._config.training.batch_size / step_s)
        row |= {f"time_{name}": value for name, value in speed.items()}
        row["time_exposed_comm_ms"] = 1000 * (self._exposed_s() - self._window_exposed) / len(self._times)
        self._write(row)

    def _read_times(self) -> None:
        """Read the times of the steps since the last reading; wait until the device has finished these steps."""
        times = self._step_clock.times()
        self._times += times
        self._recent.extend(times)

    def _diverged(self, losses: Tensor) -> None:
        """Name the step and the worker of the first loss that is not finite. Collective."""
        bad = (~losses.isfinite()).nonzero().tolist()
        mine = min(
            ((self.clock - len(losses) + 1 + step, self._workers[i].index, losses[step, i].item()) for step, i in bad),
            default=None,
        )
        step, worker, value = min(found for found in gather_objects(mine) if found is not None)
        message = f"training loss {value} at step {step} on worker {worker}"
        if self._config.training.on_nan == "stop":
            raise DivergedError(f"{message}; training.on_nan=warn would go on")
        if self.folder is not None:
            self._console.tell(f"warning: {message}")

    def _row(self, split: str) -> dict[str, Any]:
        return {"step": self.clock, "split": split, "epoch": round(self._workers[0].streams[0].epochs, 6)}

    def _write(self, row: dict[str, Any]) -> None:
        self._last[row["split"]] = row
        if self.folder is not None:
            self.folder.append(row)
            self._console.row(row)
        if self._sinks is not None:
            self._sinks.log(row)

    def _bytes_sent(self) -> int:
        return round(sum_over_ranks(self._scalar(self._local_bytes())).item())

    def _local_bytes(self) -> float:
        return _sent_by(self._workers) + self._bytes_of_leavers

    def _scalar(self, value: float) -> Tensor:
        """Return a float64 on the device, written there: copying it would wait for the device."""
        return torch.full((), value, dtype=torch.float64, device=self._device)

    def _exposed_s(self) -> float:
        """Return the exposed seconds of communication, as a mean over this process's workers."""
        return sum(worker.model.counters.exposed_s for worker in self._workers) / len(self._workers)


def _sent_by(workers: Sequence[Worker]) -> float:
    """Return the bytes that these workers sent; a simulated one stands for all its ranks, each of which would send."""
    return sum(len(worker.streams) * worker.model.counters.bytes_sent for worker in workers)
