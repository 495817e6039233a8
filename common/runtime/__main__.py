"""Plan before you buy: python -m common.runtime plan --hosts 4 --ranks-per-host 8 --compute-ms 40 ... (see --help)."""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import NoReturn

from common.runtime.cluster import Cluster
from common.runtime.plan import CANDIDATES, Plan, plan
from common.topology import NAMES

HELP = {
    "hosts": "machines",
    "ranks_per_host": "workers (GPUs) of each",
    "payload_mb": "a worker's parameters in MB: 4 bytes for each in fp32",
    "compute_ms": "forward and backward of one step",
    "backward_share": "of compute-ms",
    "update_ms": "the optimizer's step",
    "jitter": "spread of the compute time from step to step: standard deviation of its logarithm",
    "inter_gbps": "link of a host to the others, Gbit/s",
    "intra_gbps": "between two workers of a host, Gbit/s",
    "latency_us": "between hosts",
    "bucket_mb": "of all-reduce (DDP's default is 25)",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and a single line, without the usage."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: list[str] | None = None) -> None:
    """Print the table and the recommendation, draw the picture if asked; exit code 2 and one line on bad input."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    slow = dict(options.pop("slow_host"))
    topologies, steps, file = options.pop("topology") or CANDIDATES, options.pop("steps"), options.pop("plot")
    del options["command"]
    try:
        if steps < 50:
            raise ValueError(f"--steps {steps}: expected an integer >= 50")
        cluster = Cluster(**options, slow_hosts=slow)
    except ValueError as error:
        parser.error(str(error))
    planned = plan(cluster, topologies, steps=steps)
    print(render(cluster, planned))
    if file:
        draw(planned, cluster, file)


def render(cluster: Cluster, planned: Plan) -> str:
    """The table as Markdown, what does not work here, the recommendation."""
    table = planned.frame.to_markdown(index=False, floatfmt=["", "", ".2f", ".2f", ".2f", ".3g"])
    lines = [f"Predicted for {cluster.hosts} hosts of {cluster.ranks_per_host} workers:", "", table, ""]
    lines += [f"{name}: not possible here: {reason}" for name, reason in planned.skipped.items()]
    return "\n".join([*lines, planned.recommendation])


def draw(planned: Plan, cluster: Cluster, file: Path) -> None:
    """Bars of the step times: computing, and waiting."""
    import seaborn as sns
    from matplotlib import pyplot as plt

    frame = planned.frame
    labels = [f"{row.method}\n{row.topology}".replace("_", " ") for row in frame.itertuples()]
    sns.set_theme(style="whitegrid", palette="colorblind")
    figure, axes = plt.subplots(figsize=(1.4 * len(frame), 3.5), layout="constrained")
    axes.bar(labels, frame.step_ms - frame.exposed_ms, label="computing")
    axes.bar(labels, frame.exposed_ms, bottom=frame.step_ms - frame.exposed_ms, label="waiting", hatch="//")
    axes.set_ylabel("ms per step (predicted)")
    axes.set_title(f"{cluster.hosts} hosts x {cluster.ranks_per_host}, {cluster.inter_gbps:g} Gbit/s between hosts")
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _parser() -> _Parser:
    parser = _Parser(prog="python -m common.runtime", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    command = commands.add_parser(
        "plan",
        help="predict step times and recommend a topology",
        description="Predict the time of a step by all-reduce and by gossip, from numbers given by hand.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for key in dataclasses.fields(Cluster):
        if key.name in HELP:
            required = key.default is dataclasses.MISSING
            kind = int if key.name in ("hosts", "ranks_per_host") else float
            default = None if required else key.default
            flag = f"--{key.name.replace('_', '-')}"
            command.add_argument(flag, type=kind, required=required, default=default, help=HELP[key.name])
    command.add_argument(
        "--slow-host", type=_slow, action="append", default=[], metavar="HOST=FACTOR", help="repeatable"
    )
    command.add_argument("--topology", choices=NAMES, action="append", help=f"repeatable; else {', '.join(CANDIDATES)}")
    command.add_argument("--steps", type=int, default=200, help="that are simulated")
    command.add_argument("--plot", type=Path, metavar="FILE", help="also draw it (.png, .svg, .pdf)")
    return parser


def _slow(text: str) -> tuple[int, float]:
    try:
        host, factor = text.split("=")
        return int(host), float(factor)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected HOST=FACTOR, got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
