"""Draw a trace of `profile=true`: what a worker computes, and which messages are in flight meanwhile.

python -m scripts.plot_trace trace=RUN_DIR/trace/rank_0.json [output=RUN_DIR/trace/rank_0.png] [steps=2]
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from pydantic import Field, PositiveInt

from common.cli import Arguments, Text, UsageError, main_function, parse

MODULE = "scripts.plot_trace"
# Okabe and Ito's colours, distinct for the colour-blind. A later range is drawn over an earlier one.
RANGES = {
    "forward": ("computation", "#56B4E9"),
    "backward": ("computation", "#0072B2"),
    "optimizer": ("computation", "#E69F00"),
    "gossip::merge": ("computation", "#D55E00"),
    "gossip::launch": ("computation", "#CC79A7"),
    "messages in flight": ("communication", "#009E73"),
}
ROWS = ("communication", "computation")


class PlotTraceArguments(Arguments):
    """Command line of scripts.plot_trace."""

    trace: Text = Field(description="a file RUN_DIR/trace/rank_<rank>.json")
    output: Text | None = Field(None, description="the image file (null: next to the trace)")
    steps: PositiveInt = Field(2, description="steps to show")


@main_function
def main(argv: Sequence[str]) -> int:
    """Read the trace and draw its last steps."""
    arguments = parse(PlotTraceArguments, argv, MODULE, "Draw a trace recorded with profile=true.")
    spans = read_spans(Path(arguments.trace))
    begins = [begin for begin, _ in spans.pop("step")][-arguments.steps :]
    figure = Figure(figsize=(9, 2.2), layout="constrained")
    axes = figure.subplots()
    for name, (row, colour) in RANGES.items():
        found = [
            ((begin - begins[0]) / 1e3, length / 1e3) for begin, length in spans[name] if begin + length > begins[0]
        ]
        axes.broken_barh(found, (ROWS.index(row) - 0.4, 0.8), color=colour, label=name)
    end = max(begin + length for begin, length in spans["optimizer"])
    axes.set(xlim=(0, (end - begins[0]) / 1e3), xlabel="ms", yticks=range(len(ROWS)), yticklabels=ROWS)
    for begin in begins[1:]:
        axes.axvline((begin - begins[0]) / 1e3, color="black", linewidth=0.8, linestyle=":")
    figure.legend(loc="outside upper center", ncols=len(RANGES), frameon=False, fontsize="small")
    picture = Path(arguments.output or Path(arguments.trace).with_suffix(".png"))
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)
    print(f"written: {picture}")
    return 0


def read_spans(file: Path) -> dict[str, list[tuple[float, float]]]:
    """Return (begin, length) in microseconds of every range by its name; "step" has whole steps.

    Raises UsageError if the file is not a trace of a training run.
    """
    try:
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
        found = [(_range_of(event), event) for event in events]
        timed = [(name, float(event["ts"]), float(event["dur"])) for name, event in found if name is not None]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"trace={file}: expected a trace of profile=true ({error!r})") from None
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in (*RANGES, "step")}
    for name, begin, length in timed:
        spans[name].append((begin, length))
    if not spans["step"] or not spans["optimizer"]:
        raise UsageError(f"trace={file}: holds no step of a training run; make one by profile=true")
    return {name: sorted(found) for name, found in spans.items()}


def _range_of(event: dict[str, Any]) -> str | None:
    if event.get("ph") != "X" or event.get("cat") != "user_annotation":
        return None
    name = event["name"]
    if name.startswith("ProfilerStep#"):
        return "step"
    if name.startswith(("gloo:", "nccl:")):
        return "messages in flight"
    return name if name in RANGES else None


if __name__ == "__main__":
    sys.exit(main())
