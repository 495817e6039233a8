"""Compare the runtime model's predictions with published or measured step times, row by row.

python -m scripts.benchmarks.runtime_model against=figure6        results/benchmarks/figure6_prediction.{csv,md}
python -m scripts.benchmarks.runtime_model against=parallel       results/benchmarks/parallel_prediction.{csv,md}
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pandas as pd
from pydantic import Field, NonNegativeFloat, PositiveFloat

from common.cli import Arguments, Text, UsageError, command_of, main_function, parse
from common.report.benchmark import Benchmark
from common.report.published import load_published
from common.runtime.figure6 import CALIBRATION, PAYLOAD_MB, predict_figure6
from common.runtime.validation import predict_measured
from scripts.benchmarks.parallel_engines import SEED, WARM_UP

MODULE = "scripts.benchmarks.runtime_model"
FIGURE6 = {
    "cluster": "hardware of the paper",
    "workers": "GPUs",
    "hosts": "nodes",
    "ranks_per_host": "GPUs of a node",
    "method": "as the figure names it",
    "published_ms": "published, ms per iteration",
    "predicted_ms": "predicted: gossip by as few bytes as a host can send (hierarchical; Exp between hosts, complete "
    "inside)",
    "error_percent": "of predicted_ms",
    "predicted_flat_ms": "predicted: every rank sends its whole vector (Exp), or takes part in a ring all-reduce (AER)",
    "error_flat_percent": "of predicted_flat_ms",
    "used_as": "calibration: predicted_ms was fitted to it (two numbers for the three rows of a cluster)",
}
PARALLEL = {
    "engine": "ddp, decent_dp, ours or ours_local (with local steps)",
    "model": "what was trained",
    "hosts": "emulated hosts",
    "ranks_per_host": "processes of each",
    "mbit_per_s": "of a host's link, in both directions",
    "topology": "as in parallel.csv",
    "compute_ms": "forward and backward, a wait",
    "condition": "how unevenly ranks compute",
    "update_ms": "the optimizer's step: step_ms of `alone` with the same optimizer, less compute_ms",
    "measured_ms": "measured, per step",
    "predicted_ms": "predicted",
    "error_percent": "of predicted_ms",
}


class BenchArguments(Arguments):
    """Command line of scripts.benchmarks.runtime_model."""

    against: Literal["figure6", "parallel"] = Field(description="figure6 (published) or parallel (measured)")
    measured: Text = Field("results/benchmarks/parallel.csv", description="what scripts.benchmarks.parallel wrote")
    delay_ms: NonNegativeFloat = Field(1.0, description="one-way delay between the hosts that were measured")
    intra_gbps: PositiveFloat = Field(8.0, description="between two processes of one host that were measured")
    output: Text = Field("results/benchmarks", description="where the table goes")


@main_function
def main(argv: Sequence[str]) -> int:
    """Predict, compare, write the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Compare predicted step times with known ones.")
    (against_figure6 if arguments.against == "figure6" else against_parallel)(arguments)
    return 0


def against_figure6(arguments: BenchArguments) -> None:
    """Write results/benchmarks/figure6_prediction.{csv,md}."""
    benchmark = Benchmark("figure6_prediction", "Runtime model against Figure 6 of arXiv 2410.11998", FIGURE6, {})
    frame, fitted = predict_figure6(load_published("figure6").frame())
    predictions = frame[frame.used_as == "prediction"]
    fits = "; ".join(f"{name}: {a:.0f} ms / workers + {b:.1f} ms" for name, (a, b) in fitted.items())
    by_method = "; ".join(f"{name} {errors(of)}" for name, of in [("all", predictions), *groups(predictions)])
    conclusion = [
        "Published and predicted times are in separate columns; none was measured here. Calibrated from the "
        f"column {CALIBRATION} of each cluster, with links of the named rate and fp32 messages of "
        f"{PAYLOAD_MB:g} MB. Compute time found: {fits}.",
        f"Median error of the {len(predictions)} predicted numbers: {by_method}.",
        "SGP sends what Decent (Exp) sends, so the model predicts the same time for both; it does not know what SGP's "
        "code costs beyond that. Where predicted_flat_ms is far above the published time, one fp32 vector for each GPU "
        "does not fit through the node's link in that time: the published runs must have sent fewer bytes between "
        "nodes.",
    ]
    command = command_of(MODULE, arguments)
    benchmark.write(frame.to_dict("records"), conclusion, arguments.output, command, "1 used")


def against_parallel(arguments: BenchArguments) -> None:
    """Write results/benchmarks/parallel_prediction.{csv,md}, named after the table that was measured."""
    benchmark = Benchmark(
        f"{Path(arguments.measured).stem}_prediction", "Runtime model against measured step times", PARALLEL, {}
    )
    try:
        measured = pd.read_csv(arguments.measured)
        frame, left_out = predict_measured(
            measured, delay_ms=arguments.delay_ms, intra_gbps=arguments.intra_gbps, warm_up=WARM_UP, seed=SEED
        )
    except FileNotFoundError:
        raise UsageError(
            f"measured={arguments.measured}: no such file; scripts.benchmarks.parallel writes it"
        ) from None
    except ValueError as error:
        raise UsageError(f"measured={arguments.measured}: {error}") from None
    if frame.empty:
        raise UsageError(f"measured={arguments.measured}: no row to predict; {'; '.join(left_out)}")
    by_engine = "; ".join(f"{name} {errors(of)}" for name, of in groups(frame, "engine"))
    by_condition = "; ".join(f"{name} {errors(of)}" for name, of in groups(frame, "condition"))
    conclusion = [
        f"Emulated computing, links of the set rate less the frames' headers, one-way delay {arguments.delay_ms:g} ms, "
        f"{arguments.intra_gbps:g} Gbit/s inside a host. Nothing is fitted to the rows. Uneven compute times are "
        "predicted with the draws that were emulated.",
        f"Median error of {len(frame)} rows: {errors(frame)}. By engine: {by_engine}. By condition: {by_condition}.",
        *(f"Left out: {reason}." for reason in left_out),
    ]
    benchmark.write(frame.to_dict("records"), conclusion, arguments.output, command_of(MODULE, arguments), "1 used")


def groups(frame: pd.DataFrame, key: str = "method") -> list[tuple[str, pd.DataFrame]]:
    """Return (name, rows) in the order in which they come up."""
    return [(str(name), group) for name, group in frame.groupby(key, sort=False)]


def errors(frame: pd.DataFrame) -> str:
    """Return the median and the largest error as text."""
    found = frame.error_percent.abs()
    flat = f", flat {frame.error_flat_percent.abs().median():.1f} %" if "error_flat_percent" in frame else ""
    return f"{found.median():.1f} % (at most {found.max():.1f} %{flat})"


if __name__ == "__main__":
    sys.exit(main())
