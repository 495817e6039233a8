"""Progress that rank 0 shows: a bar on a terminal, a line every 20 seconds anywhere else."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

SECONDS_BETWEEN_LINES = 20.0


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
