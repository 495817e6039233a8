"""Plan before you buy: python -m common.planner plan hosts=4 workers_per_host=8 compute_ms=40 ... (see --help)."""

import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from common.cli import ONE_OR_SEVERAL, Arguments, UsageError, main_function, parse
from common.options import GossipOptions, Outer
from common.planner.cluster import Cluster
from common.planner.conditions import CONDITIONS
from common.planner.memory import STATE
from common.planner.plan import CANDIDATES, Plan, plan, sensitivity
from common.topology import NAMES

MOST_STEPS = 200


class PlanArguments(Arguments):
    """Command line of common.planner: `plan`, and the fields of Cluster."""

    positional = "command"

    command: Literal["plan"] = Field(description="plan: predict step times and recommend a topology")
    hosts: int = Field(description="number of machines")
    workers_per_host: int = Field(
        Cluster.workers_per_host, description="workers on each: single GPUs, or groups of GPUs (see shards)"
    )
    shards: int = Field(
        Cluster.shards, ge=1, description="GPUs over which a worker's parameters are sharded (parallel.shard=true)"
    )
    optimizer: Literal[tuple(STATE)] = Field("adamw", description="the optimizer, to estimate a GPU's memory")
    payload_mb: float = Field(Cluster.payload_mb, description="a worker's parameters in MB: 4 bytes each in fp32")
    compute_ms: float = Field(Cluster.compute_ms, description="forward and backward pass of one step")
    backward_share: float = Field(Cluster.backward_share, description="share of the backward pass in compute_ms")
    update_ms: float = Field(Cluster.update_ms, description="the optimizer's step")
    jitter: float = Field(
        Cluster.jitter,
        description="spread of the compute time from step to step: standard deviation of its logarithm; 0.05 is about "
        "5 %",
    )
    inter_gbps: float = Field(Cluster.inter_gbps, description="rate of a host's link to the others, Gbit/s")
    intra_gbps: float = Field(Cluster.intra_gbps, description="rate between two GPUs on a host, Gbit/s")
    latency_us: float = Field(Cluster.latency_us, description="latency between hosts")
    intra_latency_us: float = Field(Cluster.intra_latency_us, description="latency between two workers on a host")
    bucket_mb: float = Field(Cluster.bucket_mb, description="bucket size of all-reduce (DDP's default is 25)")
    gossip_bucket_mb: float = Field(Cluster.gossip_bucket_mb, description="bucket size of gossip")
    slow_host: dict[int, float] = Field(
        {}, description="slow_host.HOST=FACTOR: HOST (from 0) computes FACTOR times slower"
    )
    slow_link: dict[int, float] = Field(
        {}, description="slow_link.HOST=FACTOR: HOST (from 0) has a link FACTOR times slower"
    )
    topology: Annotated[tuple[Literal[NAMES], ...], ONE_OR_SEVERAL] = Field(
        CANDIDATES, description=f"one or several ([aer,ring]) of {', '.join(NAMES)}"
    )
    local_steps: int = Field(1, ge=1, le=1000, description="updates in a round of gossip; 1: a round in every step")
    merge_after: int | None = Field(
        None, ge=0, description="merge a round before this update of it; null: a third of the way in; 0: at its end"
    )
    fragments: int = Field(1, ge=1, description="parts of the parameters that take turns within a round")
    outer: dict[Literal["lr", "momentum"], float] = Field(
        {}, description="outer.lr=LR outer.momentum=MOMENTUM: the outer optimizer, to estimate a GPU's memory"
    )
    steps: int | None = Field(
        None, ge=50, le=10000, description=f"steps to simulate; null: {MOST_STEPS}, fewer for many workers"
    )
    uneven: bool = Field(
        False, description="also show how much longer a step takes with several kinds of uneven compute times"
    )

    def cluster(self) -> dict[str, Any]:
        """Return the given fields of Cluster."""
        renamed = {"slow_host": "slow_hosts", "slow_link": "slow_links"}
        given = {renamed.get(name, name): getattr(self, name) for name in self.model_fields_set}
        return {field.name: given[field.name] for field in fields(Cluster) if field.name in given}


@main_function
def main(argv: Sequence[str]) -> int:
    """Print the table and the recommendation; exit code 2 and one line on bad input."""
    description = "Predict the time of a step by all-reduce and by gossip."
    arguments = parse(PlanArguments, argv, "common.planner", description)
    try:
        cluster = Cluster(**arguments.cluster())
        rounds = {"merge_after": arguments.merge_after, "fragments": arguments.fragments}
        local = GossipOptions(None, arguments.local_steps, Outer(**arguments.outer), **rounds).plan
        steps = arguments.steps or max(60, min(MOST_STEPS, 2**15 // cluster.workers))
        local_steps = None if local.every_update and local.merge_after > 0 else local  # None: bucket by bucket
        planned = plan(cluster, arguments.topology, local_steps, optimizer=arguments.optimizer, steps=steps)
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(render(cluster, planned))
    if arguments.uneven:
        print(render_uneven(sensitivity(cluster, arguments.topology, local_steps, steps=steps)))
    return 0


def render(cluster: Cluster, planned: Plan) -> str:
    """Return the table as Markdown, the topologies that do not exist here and the recommendation."""
    table = planned.frame.to_markdown(index=False, floatfmt=["", "", "", ".2f", ".2f", ".2f", ".3g", ".4g", ".3g"])
    each = f" of {cluster.shards} GPUs" if cluster.shards > 1 else ""
    workers = "1 worker" if cluster.workers_per_host == 1 else f"{cluster.workers_per_host} workers"
    lines = [f"Predicted for {cluster.hosts} hosts of {workers}{each}:", "", table, ""]
    lines += ["sent_mb: per GPU and round; memory_gb: per GPU, without activations and layers that FSDP gathers", ""]
    lines += [f"{name}: not possible here: {reason}" for name, reason in planned.skipped.items()]
    return "\n".join([*lines, planned.recommendation])


def render_uneven(frame: pd.DataFrame) -> str:
    """Return the cost of uneven computing as Markdown."""
    legend = [f"- {name}: {condition.label}" for name, condition in CONDITIONS.items() if name in frame]
    table = frame.to_markdown(index=False, floatfmt=".3f")
    return "\n".join(["", "Step time relative to even compute times:", "", *legend, "", table])


if __name__ == "__main__":
    sys.exit(main())
