"""The configuration keys that the gpt2 task adds to common.config.config."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from common.config.base import FilePath, Fraction, Strict
from common.config.config import Config


class TokenData(Strict):
    """Keys that all data shares: a folder of token files.

    shard:              "independent": each rank draws its own windows; "contiguous": it draws them from its own part of
                        the tokens, so that the ranks' data differ; "global": the windows of an update are the same for
                        any number of ranks
    evaluation_batches: batches of evaluation.batch_size windows of each split, over all ranks; null for all
    evaluation_windows: "spread": evenly over the split, the same in every evaluation; "drawn": at random, anew in every
                        evaluation
    """

    folder: FilePath
    shard: Literal["independent", "contiguous", "global"]
    evaluation_batches: PositiveInt | None
    evaluation_windows: Literal["spread", "drawn"] = "spread"

    @model_validator(mode="after")
    def _some_are_drawn(self) -> "TokenData":
        if self.evaluation_windows == "drawn" and self.evaluation_batches is None:
            raise ValueError("evaluation_batches=null with evaluation_windows=drawn: expected how many to draw")
        return self


class TokenFolder(TokenData):
    """Token files made by gpt2.prepare."""

    name: Literal["openwebtext", "debian_prose", "tokens"]


class PythonStdlib(TokenData):
    """The sources of Python's standard library, prepared on first use."""

    name: Literal["python_stdlib"]
    tokenizer: Annotated[str, Field(pattern=r"^(gpt2|bytes|bpe_\d+)$")]
    validation_fraction: Annotated[float, Field(gt=0, lt=1)]


class Shape(Strict):
    """The dimensions of a GPT-2.

    name:       of its configuration file, if it has one
    vocabulary: rows of the embedding, at least the tokenizer's size (a multiple of 64 is faster on GPUs)
    context:    longest sequence, in tokens
    bias:       whether linear layers and LayerNorms have biases; OpenAI's models have them, the paper's does not
    gelu:       "exact" as in the paper's model, or its approximation by "tanh" as in OpenAI's
    """

    name: str = ""
    layers: PositiveInt
    heads: PositiveInt
    width: PositiveInt
    vocabulary: PositiveInt
    context: PositiveInt
    bias: bool = False
    dropout: Fraction = 0.0
    gelu: Literal["exact", "tanh"] = "tanh"
    later: ClassVar[Mapping[str, Any]] = {"gelu": "tanh"}

    @model_validator(mode="after")
    def _heads_divide(self) -> "Shape":
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads}: expected a divisor of model.width={self.width}")
        return self


class Gpt2Config(Config):
    """Configuration of `python -m gpt2.train`.

    peak_tflops: peak of one device, for the model FLOPs utilisation; null: looked up by the GPU's name
    """

    data: Annotated[TokenFolder | PythonStdlib, Field(discriminator="name")]
    model: Shape
    peak_tflops: PositiveFloat | None

    @property
    def sample_size(self) -> int:
        """Tokens of a sequence."""
        return self.model.context
