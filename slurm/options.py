"""Options for sbatch: from a file in slurm/clusters, and added by the user."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.cli import UsageError, words_of
from common.experiments.definitions import ROOT

CLUSTERS = ROOT / "slurm" / "clusters"
DEFAULT_CLUSTER = "one_node_cpu"

# Options of sbatch that are read here; all others are only handed on.
SIZES = ("nodes", "gpus-per-node", "ntasks-per-node")
ACCOUNTS = ("account", "partition", "qos", "reservation")  # also needed by the job that builds the table
TOTALS = ("-G", "--gpus", "--gpus-per-task")  # these do not tell how many ranks a node has
SHORT = {"nodes": "-N", "account": "-A", "partition": "-p", "qos": "-q"}


class Gres(argparse.Action):
    """--gres=gpu[:type][:count] means --gpus-per-node; other resources stay."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:  # noqa: ANN001
        """Store the value as argparse expects it."""
        others = []
        for resource in values.split(","):
            name, _, count = resource.partition(":")
            if name != "gpu":
                others.append(resource)
            elif count.split(":")[-1].isdecimal():
                setattr(namespace, "gpus-per-node", count)
            else:
                setattr(namespace, "gpus-per-node", f"{count}:1".lstrip(":"))
        if others:
            namespace.gres = ",".join(others)


@dataclass(frozen=True)
class SbatchOptions:
    """Options of sbatch. The user's options take precedence over the file's.

    known:  values of SIZES and ACCOUNTS that are given, and of --gres without GPUs
    others: all other options, as they were written
    """

    known: Mapping[str, str]
    others: tuple[str, ...]

    @classmethod
    def load(cls, name: str, more: str | None = None) -> "SbatchOptions":
        """Return the options of the preset `name`, or of the user's file at this path, then `more`.

        Inside a job, its account, partition, QOS and reservation hold unless others are given. Raises UsageError if
        there is no such file, or if options do not fit.
        """
        presets = {file.name: file for file in sorted(CLUSTERS.iterdir())}
        file = presets.get(name, Path(name))
        if not file.is_file():
            raise UsageError(
                f"cluster={name}: expected a file of yours, or one of slurm/clusters: {', '.join(presets)}"
            )
        try:
            lines = [line for line in file.read_text().splitlines() if line.strip() and not line.startswith("#")]
        except UnicodeDecodeError as error:
            raise UsageError(f"cluster={name}: expected a text file of sbatch's options ({error})") from None
        words = words_of("sbatch", more)
        for key, given in ((f"cluster={name}", lines), (f"sbatch={more}", words[:1])):
            if wrong := [line for line in given if not line.startswith("-")]:
                raise UsageError(f"{key}: {wrong[0]}: expected options of sbatch, which begin with -")
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        for option in (*SIZES, *ACCOUNTS):
            parser.add_argument(*filter(None, [SHORT.get(option)]), f"--{option}", dest=option)
        parser.add_argument("--gres", action=Gres)
        parser.add_argument(*TOTALS, dest="total")
        try:
            given, others = parser.parse_known_args([*_of_this_job(), *lines, *words])
        except argparse.ArgumentError as error:
            raise UsageError(f"cluster, sbatch: {error}") from None
        values = {option: value for option, value in vars(given).items() if value is not None}
        if "total" in values:
            raise UsageError(f"cluster, sbatch: {' '.join(TOTALS)}: expected --gpus-per-node instead")
        return cls(values, tuple(others))

    @property
    def ranks_per_node(self) -> int:
        """One for each GPU; without GPUs as many as --ntasks-per-node says."""
        ranks = self.known.get("gpus-per-node", "0")
        ranks = self.known.get("ntasks-per-node", "1") if ranks == "0" else ranks
        count = ranks.split(":")[-1]
        if not count.isdecimal() or int(count) == 0:
            raise UsageError(f"ranks of a node: {ranks} (cluster, sbatch): expected a number, such as 4 or a40:4")
        return int(count)

    def for_ranks(self, ranks: int) -> tuple[str, ...]:
        """Return the options with the number of nodes that `ranks` fill; raise UsageError if one is partly filled."""
        nodes, left = divmod(ranks, self.ranks_per_node)
        if left:
            raise UsageError(
                f"{ranks} ranks on nodes of {self.ranks_per_node} (cluster, sbatch): expected a multiple of it"
            )
        return (*self._options(*SIZES[1:], "gres", *ACCOUNTS), *self.others, f"--nodes={nodes}")

    def for_report(self, more: str | None) -> tuple[str, ...]:
        """Return account, partition, QOS and reservation, then the user's options, which take precedence."""
        return (*self._options(*ACCOUNTS), *words_of("report_sbatch", more))

    def _options(self, *names: str) -> tuple[str, ...]:
        return tuple(f"--{name}={self.known[name]}" for name in names if name in self.known)


def _of_this_job() -> list[str]:
    values = {option: os.environ.get(f"SLURM_JOB_{option.upper()}") for option in ACCOUNTS}
    return [f"--{option}={value}" for option, value in values.items() if value]
