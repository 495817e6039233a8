"""Services that receive the rows of metrics.jsonl: Weights & Biases, TensorBoard. Rank 0 only.

The run's own records never depend on them: one that fails is named once and left out from then on.
"""

import shlex
import sys
from collections.abc import Callable
from typing import Any, Protocol

from common.config.config import Config


class Sink(Protocol):
    """A receiver of the rows of metrics.jsonl; their keys follow the split: "train/loss"."""

    def log(self, row: dict[str, Any]) -> None:
        """Record one row."""

    def close(self) -> None:
        """End the record."""


class WandbSink:
    """A run of wandb. Its id is the run folder's, so that a resumed run continues there.

    What wandb has cannot be taken back: of steps that are computed again, the first rows stay.

    kept, sent: see Sinks
    """

    def __init__(self, config: Config, run_id: str, kept: int, sent: int) -> None:
        import wandb

        self._repeated = range(kept + 1, sent + 1)
        offline = config.logging.wandb == "offline"
        self._offline = f"{shlex.quote(config.run_dir)}/wandb/offline-run-*" if offline else None
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
        """Record one row."""
        if row["step"] not in self._repeated:
            self._run.log(numbers(row), step=row["step"])

    def close(self) -> None:
        """End the run."""
        self._run.finish()
        if self._offline is not None:
            print(f"wandb: `wandb sync {self._offline}` uploads the run", file=sys.stderr, flush=True)


class TensorBoardSink:
    """Event files in RUN_DIR/tensorboard. Points after the step `kept` of earlier files are hidden."""

    def __init__(self, config: Config, kept: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(f"{config.run_dir}/tensorboard", purge_step=kept + 1)

    def log(self, row: dict[str, Any]) -> None:
        """Record one row."""
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()


class Sinks:
    """The configured sinks, none of which can end a run.

    kept, sent: steps of the last rows of earlier starts that are left, and that there were: the rows between them are
                written again
    """

    def __init__(self, config: Config, run_id: str, kept: int, sent: int) -> None:
        self._sinks: dict[str, Sink] = {}
        if config.logging.wandb != "disabled":
            self._guarded("wandb", lambda: self._sinks.update(wandb=WandbSink(config, run_id, kept, sent)))
        if config.logging.tensorboard:
            self._guarded("tensorboard", lambda: self._sinks.update(tensorboard=TensorBoardSink(config, kept)))

    def log(self, row: dict[str, Any]) -> None:
        """Pass a row on."""
        for name, sink in list(self._sinks.items()):
            self._guarded(name, lambda sink=sink: sink.log(row))

    def close(self) -> None:
        """End the record."""
        for name, sink in list(self._sinks.items()):
            self._guarded(name, sink.close)

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a logging service must not end a run of days, whatever it raises
            self._sinks.pop(name, None)
            print(f"warning: {name} failed and is left out from now on: {error}", file=sys.stderr, flush=True)


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the row's metrics as {"<split>/<key>": value}."""
    return {f"{row['split']}/{key}": value for key, value in row.items() if key not in ("step", "split")}
