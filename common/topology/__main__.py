"""Print a topology: python -m common.topology NAME --world-size N (see --help)."""

import argparse
import ast
import sys
from typing import Any, NoReturn

from common.topology.registry import NAMES, build
from common.topology.table import table


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and a single line, without the usage."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: list[str] | None = None) -> None:
    """Print the table, and draw the picture if asked; exits with code 2 and one line on bad input."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.rounds is not None and options.rounds < 1:
            raise ValueError(f"--rounds: expected an integer >= 1, got {options.rounds}")
        topology = build(options.name, options.world_size, options.workers_per_host, **dict(options.option))
        print(table(topology, options.rounds))
        if options.plot:
            from common.topology.plot import plot  # matplotlib is slow to import

            plot(topology, options.plot, options.rounds)
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m common.topology",
        description="Print the rounds of a gossip topology, how well they mix and what they cost.",
        epilog=f"Names: {', '.join(NAMES)}.",
    )
    parser.add_argument("name", metavar="NAME", help="the topology; names are listed below")
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="number of workers")
    parser.add_argument("--workers-per-host", type=int, default=1, metavar="L", help="default: 1")
    parser.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the topology; repeatable",
    )
    parser.add_argument("--rounds", type=int, metavar="K", help="rounds to show (default: one period)")
    parser.add_argument("--plot", metavar="FILE", help="also draw the rounds into FILE (.png, .svg, .pdf)")
    return parser


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    if value.lower() in ("true", "false"):
        return key, value.lower() == "true"
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


if __name__ == "__main__":
    sys.exit(main())
