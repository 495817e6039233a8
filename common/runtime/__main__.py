"""Plan before you buy: python -m common.runtime plan --hosts 4 --workers-per-host 8 --compute-ms 40 ... (see --help).

On a cluster that is there: torchrun --nnodes 4 --nproc-per-node 8 ... -m common.runtime plan --measure --compute-ms 40
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from common.runtime.cluster import Cluster
from common.runtime.plan import CANDIDATES, Plan, plan
from common.topology import NAMES

HELP = {
    "hosts": "machines",
    "workers_per_host": "workers (GPUs) of each",
    "payload_mb": "a worker's parameters in MB: 4 bytes for each in fp32",
    "compute_ms": "forward and backward of one step",
    "backward_share": "of compute-ms",
    "update_ms": "the optimizer's step",
    "jitter": "spread of the compute time from step to step: standard deviation of its logarithm",
    "inter_gbps": "link of a host to the others, Gbit/s",
    "intra_gbps": "between two workers of a host, Gbit/s",
    "latency_us": "between hosts",
    "intra_latency_us": "inside of a host",
    "bucket_mb": "of all-reduce (DDP's default is 25)",
    "gossip_bucket_mb": "of gossip",
}
FACTORS = {"slow_hosts": "computes FACTOR times slower", "slow_links": "has a link FACTOR times slower"}
MOST_STEPS = 200
TIMEOUT_S = 300.0  # of a collective


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and a single line, without the usage."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: list[str] | None = None) -> None:
    """Print the table and the recommendation, draw the picture if asked; exit code 2 and one line on bad input."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    topologies, steps, file = options.pop("topology") or CANDIDATES, options.pop("steps"), options.pop("plot")
    measures, tflop = options.pop("measure"), options.pop("tflop")
    del options["command"]
    for name in FACTORS:
        if name in options:
            options[name] = dict(options[name])
    try:
        if steps is not None and steps < 50:
            raise ValueError(f"--steps {steps}: expected an integer >= 50")
        if measures:
            options = _measured(options, tflop)
            if options is None:  # another rank prints
                return
        elif "hosts" not in options:
            raise ValueError("--hosts: expected the number of machines, or --measure")
        cluster = Cluster(**options)
    except ValueError as error:
        parser.error(str(error))
    planned = plan(cluster, topologies, steps=steps or max(60, min(MOST_STEPS, 2**15 // cluster.workers)))
    print(render(cluster, planned))
    if file:
        draw(planned, cluster, file)


def render(cluster: Cluster, planned: Plan) -> str:
    """The table as Markdown, what does not work here, the recommendation."""
    table = planned.frame.to_markdown(index=False, floatfmt=["", "", "", ".2f", ".2f", ".2f", ".3g"])
    lines = [f"Predicted for {cluster.hosts} hosts of {cluster.workers_per_host} workers:", "", table, ""]
    lines += [f"{name}: not possible here: {reason}" for name, reason in planned.skipped.items()]
    return "\n".join([*lines, planned.recommendation])


def draw(planned: Plan, cluster: Cluster, file: Path) -> None:
    """Bars of the step times: computing, and waiting."""
    import seaborn as sns
    from matplotlib import pyplot as plt

    frame = planned.frame
    labels = [f"{row.method}\n{row.topology}\n{row.phases}".replace("_", " ") for row in frame.itertuples()]
    sns.set_theme(style="whitegrid", palette="colorblind")
    figure, axes = plt.subplots(figsize=(1.6 * len(frame), 3.5), layout="constrained")
    axes.bar(labels, frame.step_ms - frame.exposed_ms, label="computing")
    axes.bar(labels, frame.exposed_ms, bottom=frame.step_ms - frame.exposed_ms, label="waiting", hatch="//")
    axes.set_ylabel("ms per step (predicted)")
    axes.set_title(f"{cluster.hosts} hosts x {cluster.workers_per_host}, {cluster.inter_gbps:.3g} Gbit/s between hosts")
    axes.tick_params(axis="x", labelsize=8)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _measured(given: dict[str, Any], tflop: float | None) -> dict[str, Any] | None:
    """The numbers of the cluster that this runs on, those `given` by hand in place of measured ones; rank 0 only."""
    if "RANK" not in os.environ:
        raise ValueError("--measure: expected to be started by torchrun on every host (RANK is not set)")
    if (tflop is None) == ("compute_ms" not in given):
        raise ValueError("--measure: expected one of --compute-ms and --tflop: what your model takes is not measured")
    if tflop is not None and not tflop > 0:
        raise ValueError(f"--tflop {tflop}: expected a number > 0")
    from common.parallel.collectives import rank
    from common.parallel.process_group import process_group
    from common.runtime.measure import measure

    with process_group(TIMEOUT_S) as device:
        measured = measure(device)
        if rank() != 0:
            return None
    print("\n".join([*measured.lines(), ""]))
    return measured.numbers(tflop) | given


def _parser() -> _Parser:
    parser = _Parser(prog="python -m common.runtime", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    command = commands.add_parser(
        "plan",
        help="predict step times and recommend a topology",
        description="Predict the time of a step by all-reduce and by gossip, from numbers given by hand or measured.",
    )
    for key in dataclasses.fields(Cluster):
        if key.name in HELP:
            kind = int if key.name in ("hosts", "workers_per_host") else float
            flag = f"--{key.name.replace('_', '-')}"
            default = "" if key.default is dataclasses.MISSING else f" (default: {key.default:.4g})"
            command.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=HELP[key.name] + default)
    for name, text in FACTORS.items():
        flag = f"--{name.replace('_', '-').removesuffix('s')}"
        command.add_argument(
            flag,
            type=_factor,
            action="append",
            dest=name,
            default=argparse.SUPPRESS,
            metavar="HOST=FACTOR",
            help=f"HOST (from 0) {text}; repeatable",
        )
    command.add_argument(
        "--measure",
        action="store_true",
        help="under torchrun: take links, latencies and jitter from this cluster (numbers given by hand win)",
    )
    command.add_argument(
        "--tflop", type=float, help="with --measure: of one worker's forward and backward, in place of --compute-ms"
    )
    command.add_argument("--topology", choices=NAMES, action="append", help=f"repeatable; else {', '.join(CANDIDATES)}")
    command.add_argument(
        "--steps", type=int, help=f"that are simulated (default: {MOST_STEPS}, fewer for many workers)"
    )
    command.add_argument("--plot", type=Path, metavar="FILE", help="also draw it (.png, .svg, .pdf)")
    return parser


def _factor(text: str) -> tuple[int, float]:
    try:
        host, factor = text.split("=")
        return int(host), float(factor)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected HOST=FACTOR, got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
