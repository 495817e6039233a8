"""The configuration keys that the transformer task adds to common.config.config."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from common.config.base import FilePath, Fraction, NonNegative, Seed, Strict
from common.config.config import Config
from transformer.batching import TokenLimit
from transformer.model import SmoothedOver, Variant

Language = Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]
Validation = Literal["held_out", "newstest2013"]
Cleaning = Literal["empty_lines", "length_ratio"]


class Folder(Strict):
    """Binarized parallel text in fairseq's format, made by transformer.prepare or by fairseq-preprocess.

    max_length: training pairs are cut to this many tokens on each side, EOS included; null leaves them whole
    validation: held_out: every n-th training pair, cut like the training pairs; newstest2013; null: not known
    cleaning:   what was dropped: empty_lines: pairs with an empty side; length_ratio: also long and uneven pairs;
                null: not known

    validation and cleaning are chosen when the folder is prepared; values other than the folder's are refused.
    """

    name: Literal["wmt14_en_de", "wmt14_en_fr", "libreoffice_help_en_de", "libreoffice_help_en_fr", "folder"]
    source: Language
    target: Language
    path: FilePath
    max_length: Annotated[int, Field(ge=2)] | None
    validation: Validation | None = None
    cleaning: Cleaning | None = None


class NumberNames(Strict):
    """Names of numbers, made on first use; see transformer.preparation.packaged.

    max_length:     as in `Folder`
    numbers:        all numbers are below this
    held_out:       numbers kept for validation, and as many again for test
    longest:        most numbers in a line
    train_lines:    lines of the training split
    held_out_lines: lines of the validation split, and of the test split
    merges:         of the joint byte pair encoding
    """

    name: Literal["number_names"]
    source: Language
    target: Language
    path: FilePath
    max_length: Annotated[int, Field(ge=2)] | None
    numbers: Annotated[int, Field(ge=10, le=10**9)]
    held_out: PositiveInt
    longest: PositiveInt
    train_lines: PositiveInt
    held_out_lines: PositiveInt
    merges: PositiveInt
    seed: Seed

    @model_validator(mode="after")
    def _some_left(self) -> "NumberNames":
        if 2 * self.held_out >= self.numbers:
            raise ValueError(f"held_out={self.held_out}: expected less than half of data.numbers={self.numbers}")
        return self


Data = Annotated[Folder | NumberNames, Field(discriminator="name")]


class Size(Strict):
    """Size and variant of the model; see transformer.model.

    attention_dropout: null: the variant's default
    """

    name: str
    variant: Variant = "fairseq"
    width: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    encoder_layers: PositiveInt
    decoder_layers: PositiveInt
    dropout: Fraction
    attention_dropout: Fraction | None

    @model_validator(mode="after")
    def _width_fits(self) -> "Size":
        if self.width % self.heads or self.width % 2 or self.width < 4:
            raise ValueError(f"width={self.width}: expected an even multiple of model.heads={self.heads}, at least 4")
        return self


class Decoding(Strict):
    """Beam search; see transformer.search.

    in_training: whether each evaluation in training also translates the validation set and records its BLEU
    """

    beam: PositiveInt
    length_penalty: NonNegative
    extra_length: NonNegativeInt
    in_training: bool


class TransformerConfig(Config):
    """Configuration of `python -m transformer.train`.

    smoothed_over: as `over` of transformer.model.cross_entropy
    token_limit:   as `limit` of transformer.batching.batch_by_tokens
    loss_divisor:  of a training batch's summed loss: the mean number of target tokens in a batch, or this batch's own
    """

    data: Data
    model: Size
    decoding: Decoding
    label_smoothing: Annotated[float, Field(ge=0, lt=1)]
    smoothed_over: SmoothedOver
    token_limit: TokenLimit
    loss_divisor: Literal["mean_tokens", "own_tokens"]

    @model_validator(mode="after")
    def _batches_stay(self) -> "TransformerConfig":
        if self.elastic.keep == "global_batch":
            raise ValueError(
                "elastic.keep=global_batch: expected local_batch: batches hold tokens of whole sentences, and batches "
                "of another size would repeat some and skip others"
            )
        return self


class TrainedConfig(Strict):
    """The part of a run's config.yaml that its models need; everything about training is ignored."""

    model_config = ConfigDict(extra="ignore")

    name: str
    data: Data
    model: Size
    decoding: Decoding
    label_smoothing: Annotated[float, Field(ge=0, lt=1)]
    smoothed_over: SmoothedOver = "wrong_tokens"
