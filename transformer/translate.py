"""Translates raw lines from standard input to standard output.

python -m transformer.translate --checkpoint runs/transformer/proxy/seed_0/checkpoints/best.pt < text
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from common.training.config import ConfigError
from transformer.corpus import Corpus
from transformer.search import Search
from transformer.translation import Translator, load_model, pick_device, read_config, read_state, with_data

LINES_AT_A_TIME = 512
BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Translate until the input ends; exit code 2 if the checkpoint or its data cannot be used."""
    arguments = parser().parse_args(argv)
    try:
        translator = make_translator(arguments)
        # A person at a terminal waits for each line; a file is translated in larger batches.
        at_a_time = 1 if sys.stdin.isatty() else LINES_AT_A_TIME
        lines = (line.rstrip("\r\n") for line in sys.stdin)
        while chunk := list(itertools.islice(lines, at_a_time)):
            for translation in translator.lines(chunk):
                print(translation, flush=at_a_time == 1)
    except (ConfigError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def make_translator(arguments: argparse.Namespace) -> Translator:
    """The translator that the command line describes; ConfigError if something is missing or does not fit."""
    run = arguments.run or arguments.checkpoint.resolve().parent.parent
    config = with_data(read_config(run), arguments.data)
    corpus, device = Corpus(config.data), pick_device(arguments.device)
    model = load_model(config, corpus, read_state(arguments.checkpoint), str(arguments.checkpoint), device)
    decoding = config.decoding
    penalty = decoding.length_penalty if arguments.length_penalty is None else arguments.length_penalty
    search = Search(arguments.beam or decoding.beam, penalty, decoding.extra_length)
    return Translator(model, corpus, search, arguments.batch_size, device)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m transformer.translate", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--checkpoint", type=Path, required=True, help="a mean model: RUN_DIR/checkpoints/best.pt")
    made.add_argument("--run", type=Path, help="the run folder with its config.yaml; by default where the model lies")
    made.add_argument("--data", help="the data folder; by default the run's")
    made.add_argument("--beam", type=int, help="hypotheses at a time; by default the run's")
    made.add_argument("--length-penalty", type=float, help="by default the run's")
    made.add_argument("--batch-size", type=int, default=4096, help="source tokens in a batch")
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return made


if __name__ == "__main__":
    sys.exit(main())
