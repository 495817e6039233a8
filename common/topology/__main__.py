"""Print a topology: python -m common.topology NAME world_size=N (see --help)."""

import sys
from collections.abc import Sequence
from typing import Any

from pydantic import Field, PositiveInt

from common.cli import Arguments, Text, UsageError, main_function, one_line, parse
from common.topology.families import NAMES, build
from common.topology.table import table


class TopologyArguments(Arguments):
    """Command line of common.topology."""

    positional = "name"

    name: Text = Field(description=f"a topology: {', '.join(NAMES)}")
    world_size: int = Field(description="number of workers")
    workers_per_host: int = Field(1, description="workers on each host")
    option: dict[str, Any] = Field({}, description="an option of the topology, such as option.k=2")
    rounds: PositiveInt | None = Field(None, le=10**6, description="rounds to show; null: one period, or 8 if random")
    plot: Text | None = Field(None, description="file for a picture of the rounds (.png, .svg, .pdf)")


@main_function
def main(argv: Sequence[str]) -> int:
    """Print the table, and draw the picture if asked; exit code 2 and one line on bad input."""
    description = "Print the rounds of a gossip topology, how well they mix and what they cost."
    arguments = parse(TopologyArguments, argv, "common.topology", description)
    try:
        topology = build(arguments.name, arguments.world_size, arguments.workers_per_host, **arguments.option)
        text = table(topology, arguments.rounds)
    except (ValueError, TypeError) as error:  # TypeError: an option is one of build's own arguments
        raise UsageError(one_line(error)) from error
    print(text)
    if arguments.plot:
        from common.topology.plot import plot  # matplotlib is slow to import

        try:
            plot(topology, arguments.plot, arguments.rounds)
        except (ValueError, OSError) as error:
            raise UsageError(one_line(error)) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
