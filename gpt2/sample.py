"""Write text with a trained model.

python -m gpt2.sample run=runs/gpt2/proxy/seed_0
python -m gpt2.sample run=runs/gpt2/proxy/seed_0 prompt="class Stack:" tokens=300 temperature=0.7 top_k=20 seed=3
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, PositiveInt
from torch import Tensor
from yaml import YAMLError

from common.cli import Arguments, Text, UsageError, main_function, one_line, parse
from common.config.base import Seed
from common.config.config import ConfigError
from common.record.checkpoint import fill_model, read_model
from gpt2.config import Shape
from gpt2.model import GPT2
from gpt2.token_files import DataError, read_header
from gpt2.tokenizer import Tokenizer, load_tokenizer

# Errors from reading another task's configuration, or a file that is not a configuration.
UNREADABLE = (OSError, YAMLError, OmegaConfBaseException, KeyError, TypeError, ValueError, RecursionError)

COLDEST = 1e-30  # below it logits / temperature could be infinite; the likeliest token is the limit


class SampleArguments(Arguments):
    """Command line of gpt2.sample."""

    run: Text = Field(description="the folder of a run")
    checkpoint: Literal["best", "last"] = Field("best", description="best or last mean model of all workers")
    prompt: str = Field("", description="beginning of the text; empty: start a new document")
    tokens: PositiveInt = Field(200, description="maximum number of tokens to add")
    samples: PositiveInt = Field(1, description="number of texts")
    temperature: Annotated[float, Field(ge=0)] = Field(0.8, description="0: always take the likeliest token")
    top_k: PositiveInt | None = Field(40, description="sample from the K likeliest tokens; null: from all")
    seed: Seed = Field(0, description="random seed of the sampling")
    device: Literal["cpu", "cuda"] = Field("cpu", description="cpu or cuda")


@main_function
def main(argv: Sequence[str]) -> int:
    """Print the texts, separated by lines of dashes."""
    arguments = parse(SampleArguments, argv, "gpt2.sample", "Write text with a trained model.")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda: no GPU is available, expected cpu")
    try:
        model, tokenizer = load(Path(arguments.run), arguments.checkpoint)
    except (ConfigError, DataError) as error:
        raise UsageError(str(error)) from error
    sys.stdout.reconfigure(errors="replace")  # the terminal may lack a character
    for text in write(model.to(arguments.device), tokenizer, arguments):
        print(text)
        if arguments.samples > 1:
            print("-" * 80)
    return 0


def load(run: Path, checkpoint: str) -> tuple[GPT2, Tokenizer]:
    """Load a run's mean model and the tokenizer of its data. Raises ConfigError or DataError if one is unusable."""
    try:
        config = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
        # Only these two keys, so that runs that predate some other key stay readable.
        shape, folder = Shape.model_validate(config["model"]), Path(config["data"]["folder"])
    except UNREADABLE as error:
        raise ConfigError(f"run={run}: expected the config.yaml of a gpt2 run ({one_line(error)})") from error
    model = GPT2(shape)
    file = run / "checkpoints" / f"{checkpoint}.pt"
    fill_model(model, read_model(file), str(file))
    header = read_header(folder)
    return model.eval(), load_tokenizer(header.encoding, folder, header.vocabulary)


def write(model: GPT2, tokenizer: Tokenizer, arguments: SampleArguments) -> Iterator[str]:
    """Yield texts that begin with the prompt and end at end-of-text or after `arguments.tokens` more tokens."""
    device = model.tokens.weight.device
    generator = torch.Generator(device).manual_seed(arguments.seed)
    # In training every document follows the end of another one.
    start = [tokenizer.end_of_text, *tokenizer.encode(arguments.prompt).tolist()]
    for _ in range(arguments.samples):
        tokens = torch.tensor([start], device=device)
        for _ in range(arguments.tokens):
            chosen = choose(next_logits(model, tokens, tokenizer.vocabulary_size), arguments, generator)
            if int(chosen) == tokenizer.end_of_text:
                break
            tokens = torch.cat([tokens, chosen.view(1, 1)], dim=1)
        yield tokenizer.decode(tokens[0, 1:].tolist())


@torch.inference_mode()
def next_logits(model: GPT2, tokens: Tensor, vocabulary: int) -> Tensor:
    """Return the logits [vocabulary] of the token after tokens [1, T], without rows that only pad the embedding."""
    return model(tokens[:, -model.shape.context :])[0, -1, :vocabulary].float()


def choose(logits: Tensor, arguments: SampleArguments, generator: torch.Generator) -> Tensor:
    """Draw a token, a scalar, from logits [vocabulary]."""
    if arguments.temperature < COLDEST:
        return logits.argmax()
    if arguments.top_k is not None and arguments.top_k < len(logits):
        least = logits.topk(arguments.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    shares = torch.softmax(logits / arguments.temperature, dim=-1)
    return torch.multinomial(shares, 1, generator=generator)[0]


if __name__ == "__main__":
    sys.exit(main())
