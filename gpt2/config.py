"""The gpt2 task's configuration: what it adds to common.training.config."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from common.training.config import Config, Fraction, Strict
from gpt2.model import Shape


class TokenData(Strict):
    """Common to all data: a folder of token files.

    shard: "independent" windows for each rank, or "global": the same windows in an update for any number of ranks
    evaluation_batches: of evaluation.batch_size windows, of each split, spread evenly over it; null for all of it
    """

    folder: str
    shard: Literal["independent", "global"]
    evaluation_batches: PositiveInt | None


class TokenFolder(TokenData):
    """Token files made by gpt2.prepare."""

    name: Literal["openwebtext", "tokens"]


class PythonStdlib(TokenData):
    """The Python standard library's sources, prepared on first use."""

    name: Literal["python_stdlib"]
    tokenizer: Annotated[str, Field(pattern=r"^(gpt2|bytes|bpe_\d+)$")]
    validation_fraction: Annotated[float, Field(gt=0, lt=1)]


class Gpt2(Strict):
    """gpt2.model.Shape under the name of its file."""

    name: str
    layers: PositiveInt
    heads: PositiveInt
    width: PositiveInt
    vocabulary: PositiveInt
    context: PositiveInt
    bias: bool
    dropout: Fraction

    @model_validator(mode="after")
    def _heads_divide(self) -> "Gpt2":
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads}: expected a divisor of model.width={self.width}")
        return self

    @property
    def shape(self) -> Shape:
        """What the model is built from."""
        return Shape(**self.model_dump(exclude={"name"}))


class Gpt2Config(Config):
    """Configuration of `python -m gpt2.train`.

    peak_tflops: of one device, for the model FLOPs utilisation; null: looked up by the GPU's name
    """

    data: Annotated[TokenFolder | PythonStdlib, Field(discriminator="name")]
    model: Gpt2
    peak_tflops: PositiveFloat | None
