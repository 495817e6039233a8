"""Other outputs for the rows of metrics.jsonl: the console, Weights & Biases, TensorBoard. Rank 0 only.

The run's own records never depend on these services: one that fails is reported once and left out from then on.
"""

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from common.config.config import Config

SECONDS_BETWEEN_LINES = 20.0  # on a console that is not a terminal


class Console:
    """Progress of one process's run on standard error; shows nothing if `shown` is false."""

    def __init__(self, shown: bool, step: int, steps: int) -> None:
        self._shown, self._steps = shown, steps
        self._first, self._begin = step, time.monotonic()
        self._printed = self._begin
        terminal = shown and sys.stderr.isatty()
        self._bar = tqdm(total=steps, initial=step, unit="step", dynamic_ncols=True) if terminal else None

    def row(self, row: Mapping[str, Any]) -> None:
        """Show a row of metrics.jsonl."""
        if not self._shown:
            return
        text = describe(row)
        if self._bar is not None:
            self._bar.set_postfix_str(text)
            self._bar.update(row["step"] - self._bar.n)
        elif row["split"] != "train" or time.monotonic() - self._printed > SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            done = row["step"] - self._first
            left = (self._printed - self._begin) / max(1, done) * (self._steps - row["step"])
            remaining = timedelta(seconds=round(min(left, 1e12)))
            print(f"step {row['step']}/{self._steps}  {text}  {remaining} left", file=sys.stderr, flush=True)

    def tell(self, sentence: str) -> None:
        """Print a notice, whether progress is shown or not."""
        if self._bar is not None:
            self._bar.write(sentence, file=sys.stderr)
        else:
            print(sentence, file=sys.stderr, flush=True)

    def close(self, summary: Mapping[str, Any], folder: object) -> None:
        """End with the summary as a small table, and the path of the run's folder."""
        if self._bar is not None:
            self._bar.close()
        if not self._shown:
            return
        table = {"status": summary["status"], "steps": summary["steps"], "workers": summary["workers"]}
        for split, row in summary["last"].items():
            table |= {f"{split} {key}": value for key, value in row.items() if key in ("loss", "accuracy", "bleu")}
        table |= {"consensus distance": summary["consensus_distance"], "bytes sent": summary["bytes_sent"]}
        table |= {"ms per step (median)": summary["time_step_ms"], "ms per step (mean)": summary["time_step_ms_mean"]}
        table |= {"run folder": str(folder)}
        shown = [(name, f"{v:.5g}" if isinstance(v, float) else v) for name, v in table.items() if v is not None]
        print(tabulate(shown, tablefmt="plain", disable_numparse=True), file=sys.stderr, flush=True)


def describe(row: Mapping[str, Any]) -> str:
    """Return the row's main metrics as a short text."""
    keys = [key for key in ("loss", "accuracy", "bleu", "lr") if key in row]
    return f"{row['split']} " + " ".join(f"{key} {row[key]:.4g}" for key in keys)


class WandbSink:
    """A run of wandb. Its id is the run folder's, so that a resumed run continues there.

    Rows sent to wandb cannot be taken back: for steps that are computed again, the first rows stay.

    kept, sent: see Sinks
    """

    def __init__(self, config: Config, run_id: str, kept: int, sent: int) -> None:
        import wandb

        self._repeated = range(kept + 1, sent + 1)
        offline = config.logging.wandb == "offline"
        self._offline = f"{shlex.quote(config.run_dir)}/wandb/offline-run-*" if offline else None
        if wandb.run is not None:  # an earlier run of a multirun, which failed
            wandb.finish(exit_code=1)
        self._run = wandb.init(
            project=config.logging.wandb_project,
            name=f"{config.task}/{config.name}/seed_{config.seed}",
            id=run_id,
            resume="allow",
            mode=config.logging.wandb,
            dir=config.run_dir,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True),
        )

    def log(self, row: dict[str, Any]) -> None:
        """Record one row; its keys follow the split: "train/loss"."""
        if row["step"] not in self._repeated:
            self._run.log(numbers(row), step=row["step"])

    @staticmethod
    def abandon() -> None:
        """Leave a failed service: otherwise wandb would try again when the program ends, and print why it cannot.

        Its process receives signals that Slurm sends to all processes, and ends before the run.
        """
        import wandb

        with contextlib.suppress(Exception, SystemExit):
            wandb.teardown()

    def close(self) -> None:
        """End the run."""
        self._run.finish()
        if self._offline is not None:
            print(f"wandb: to upload the run: `wandb sync {self._offline}`", file=sys.stderr, flush=True)


class TensorBoardSink:
    """Event files in RUN_DIR/tensorboard. Points after the step `kept` of earlier files are hidden."""

    def __init__(self, config: Config, kept: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(f"{config.run_dir}/tensorboard", purge_step=kept + 1)

    def log(self, row: dict[str, Any]) -> None:
        """Record one row."""
        for name, value in numbers(row).items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()


class Sinks:
    """The configured sinks, none of which can end a run.

    kept, sent: step of the last row of earlier starts that is left, and of the last row that they wrote: the rows in
                between are written again
    """

    def __init__(self, config: Config, run_id: str, kept: int, sent: int) -> None:
        self._sinks: dict[str, WandbSink | TensorBoardSink] = {}
        if config.logging.wandb != "disabled":
            self._guarded("wandb", lambda: self._sinks.update(wandb=WandbSink(config, run_id, kept, sent)))
        if config.logging.tensorboard:
            self._guarded("tensorboard", lambda: self._sinks.update(tensorboard=TensorBoardSink(config, kept)))

    def log(self, row: dict[str, Any]) -> None:
        """Pass a row on."""
        for name, sink in list(self._sinks.items()):
            self._guarded(name, lambda sink=sink: sink.log(row))

    def close(self) -> None:
        """Close the sinks."""
        for name, sink in list(self._sinks.items()):
            self._guarded(name, sink.close)

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a logging service must not end a run of days, whatever it raises
            if isinstance(self._sinks.pop(name, None), WandbSink):
                WandbSink.abandon()
            print(f"warning: {name} failed and is disabled from now on: {error}", file=sys.stderr, flush=True)


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the row's metrics as {"<split>/<key>": value}."""
    return {f"{row['split']}/{key}": value for key, value in row.items() if key not in ("step", "split")}
