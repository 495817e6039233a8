"""Translate raw lines from standard input to standard output.

python -m transformer.translate checkpoint=runs/transformer/proxy/seed_0/checkpoints/best.pt < text
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt

from common.cli import Arguments, Text, UsageError, main_function, parse
from common.config.config import ConfigError
from common.record.checkpoint import read_model
from transformer.corpus import Corpus
from transformer.preparation.files import decoded
from transformer.search import Search
from transformer.task import check_beam
from transformer.translation import Translator, load_model, pick_device, read_config, with_data

LINES_AT_A_TIME = 512


class TranslateArguments(Arguments):
    """Command line of transformer.translate."""

    checkpoint: Text = Field(description="a mean model, such as RUN_DIR/checkpoints/best.pt")
    run: Text | None = Field(None, description="the run folder with its config.yaml; null: where the model lies")
    data: Text | None = Field(None, description="the data folder; null: the run's")
    beam: PositiveInt | None = Field(None, description="hypotheses at a time; null: as in the run")
    length_penalty: float | None = Field(None, description="null: as in the run")
    batch_size: PositiveInt = Field(4096, description="source tokens in a batch")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto, cpu or cuda")


@main_function
def main(argv: Sequence[str]) -> int:
    """Translate until the input ends; exit code 2 if the checkpoint or its data cannot be used."""
    arguments = parse(TranslateArguments, argv, "transformer.translate", "Translate lines of standard input.")
    try:
        translator = make_translator(arguments)
        # A person at a terminal waits for each line; a file is translated in larger batches.
        at_a_time = 1 if sys.stdin.isatty() else LINES_AT_A_TIME
        lines = (line.rstrip("\r") for line in decoded(sys.stdin.buffer, "standard input"))
        while chunk := list(itertools.islice(lines, at_a_time)):
            for translation in translator.lines(chunk):
                print(translation, flush=at_a_time == 1)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    return 0


def make_translator(arguments: TranslateArguments) -> Translator:
    """Return the translator that the command line describes.

    Raises ConfigError if something is missing or does not fit.
    """
    checkpoint = Path(arguments.checkpoint)
    run = Path(arguments.run) if arguments.run else checkpoint.resolve().parent.parent
    config = with_data(read_config(run), arguments.data)
    corpus, device = Corpus(config.data), pick_device(arguments.device)
    model = load_model(config, corpus, read_model(checkpoint), str(checkpoint), device)
    decoding = config.decoding
    penalty = decoding.length_penalty if arguments.length_penalty is None else arguments.length_penalty
    search = Search(arguments.beam or decoding.beam, penalty, decoding.extra_length)
    check_beam(search.beam, corpus.vocabulary, "beam")
    return Translator(model, corpus, search, arguments.batch_size, device)


if __name__ == "__main__":
    sys.exit(main())
