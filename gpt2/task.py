"""Language modelling as a task for the training loop: model, data, loss and metrics."""

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from common.config.config import ConfigError
from common.training.task import Task, TrainData
from gpt2.config import Gpt2Config, PythonStdlib, TokenFolder
from gpt2.data import Windows, drawn_starts, evaluation_batches, evaluation_starts
from gpt2.documents import STDLIB
from gpt2.model import GPT2, flops_per_token, parameter_count
from gpt2.prepare import PrepareArguments, prepare
from gpt2.token_files import DataError, Header, check_fits, open_tokens, read_header

# Dense 16-bit tensor-core peak in TFLOP/s, from NVIDIA's data sheets; the first key in the device's name counts.
PEAK_TFLOPS = {"H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "A40": 149.7, "V100": 125.0, "T4": 65.0}
EvaluationBatch = tuple[str, Tensor]  # split, windows [B, T + 1]


class LanguageModelling(Task):
    """Next-token prediction, evaluated by the mean cross-entropy in nats on windows of both splits."""

    config_class = Gpt2Config
    sums = ("train_loss", "train_tokens", "val_loss", "val_tokens")
    primary_metric = "loss"
    higher_is_better = False
    fixed_shapes = True
    late_imports = ("tiktoken",)

    def __init__(self, config: Gpt2Config) -> None:
        self._config = config
        self._shape = config.model
        folder = Path(config.data.folder)
        try:
            self._header = ensure_data(config.data)
            self._tokens = {}
            for split in ("train", "val"):
                self._tokens[split] = open_tokens(folder, self._header, split)
                parts = config.ranks if (split, config.data.shard) == ("train", "contiguous") else 1
                check_fits(folder, self._header, split, self._shape.context, self._shape.vocabulary, parts)
        except DataError as error:
            raise ConfigError(f"data.folder={folder}: {error}") from error
        self._flops_per_token = flops_per_token(self._shape)
        self._device = torch.device("cpu")  # until training data is asked for
        self._step = 0  # of the evaluation
        if config.logging.progress and os.environ.get("RANK", "0") == "0":
            print(self.describe(), file=sys.stderr, flush=True)

    @classmethod
    def check_files(cls, config: Gpt2Config) -> None:
        """Raise ConfigError if there are no token files, unless they are made on first use."""
        if isinstance(config.data, TokenFolder):
            try:
                read_header(Path(config.data.folder))
            except DataError as error:
                raise ConfigError(f"data.folder={config.data.folder}: {error}") from error

    def describe(self) -> str:
        """Describe the size of model and data, and the unigram entropy to compare the loss with."""
        parameters, header = parameter_count(self._shape), self._header
        embedded = (self._shape.vocabulary + self._shape.context) * self._shape.width
        return (
            f"{self._config.model.name}: {parameters:,} parameters ({parameters - embedded:,} without embeddings), "
            f"{self._flops_per_token / 1e6:,.1f} MFLOP per token forward and backward\n"
            f"{self._config.data.folder}: {header.tokens['train']:,} training and {header.tokens['val']:,} validation "
            f"tokens ({header.encoding}), unigram entropy {header.unigram_entropy:.4f} nats"
        )

    def build_model(self) -> nn.Module:
        """Build the configured GPT-2."""
        return GPT2(self._shape)

    def train_data(self, worker: int, workers: int, batch_size: int, device: torch.device) -> Windows:
        """Return random windows of the training split for rank `worker` of `workers`."""
        self._device = device
        return Windows(
            self._tokens["train"],
            self._shape.context,
            self._shape.vocabulary,
            batch_size,
            worker,
            workers,
            self._config.seed,
            self._config.data.shard,
            device,
            self._config.ranks,
        )

    def before_evaluation(self, step: int) -> None:
        """Note the step, on which drawn windows depend."""
        self._step = step

    def evaluation_data(
        self, shard: int, shards: int, batch_size: int, device: torch.device
    ) -> Iterator[EvaluationBatch]:
        """Yield this shard's windows of both splits, as `data.evaluation_windows` says."""
        data, context, vocabulary = self._config.data, self._shape.context, self._shape.vocabulary
        windows = data.evaluation_batches * self._config.evaluation.batch_size if data.evaluation_batches else None
        for number, (split, tokens) in enumerate(self._tokens.items()):
            if data.evaluation_windows == "drawn":
                starts = drawn_starts(len(tokens), context, windows, self._config.seed, number, self._step)
            else:
                starts = evaluation_starts(len(tokens), context, windows)
            for batch in evaluation_batches(tokens, starts[shard::shards], context, vocabulary, batch_size, device):
                yield split, batch

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats; batch [B, T + 1]."""
        return model(batch[:, :-1], batch[:, 1:])

    def evaluate(self, model: nn.Module, batch: EvaluationBatch) -> dict[str, Tensor]:
        """Return the sum of the cross-entropy and the number of tokens, for the split of the batch."""
        split, windows = batch
        count = torch.full((), windows[:, 1:].numel(), device=windows.device)
        values = dict.fromkeys(self.sums, torch.zeros((), device=windows.device))
        return values | {f"{split}_loss": self.loss(model, windows) * count, f"{split}_tokens": count}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the loss per token of both splits ("loss" is the validation's), perplexity and unigram entropy."""
        loss = sums["val_loss"] / sums["val_tokens"]
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),  # a diverged loss must not end the run here
            "train_loss": sums["train_loss"] / sums["train_tokens"],
            "unigram_entropy": self._header.unigram_entropy,
        }

    def samples(self, data: TrainData) -> float:
        """Return the tokens of a local batch."""
        return data.batch_size * self._shape.context

    def throughput(self, samples_per_s: float) -> dict[str, float]:
        """Return tokens per second of all workers and, where the peak is known, the model FLOPs utilisation."""
        tokens_per_s = samples_per_s * self._shape.context
        on_gpu = self._device.type == "cuda"
        peak = self._config.peak_tflops or (known_peak_tflops(torch.cuda.get_device_name()) if on_gpu else None)
        figures = {"tokens_per_s": tokens_per_s}
        if peak is not None:
            devices = self._config.ranks if self._config.workers.kind == "processes" else 1
            figures["mfu"] = utilisation(tokens_per_s, self._flops_per_token, peak, devices)
        return figures


def known_peak_tflops(device_name: str) -> float | None:
    """Return the peak of a GPU by its name, or None if it is not in the table."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


def utilisation(tokens_per_s: float, flops_per_token: float, peak_tflops: float, devices: int) -> float:
    """Return the share of the devices' peak, 0 to 1, that forward and backward use, recomputation not counted."""
    return tokens_per_s * flops_per_token / (peak_tflops * 1e12 * devices)


def ensure_data(data: TokenFolder | PythonStdlib) -> Header:
    """Return the header of the prepared data, preparing the embedded corpus if it is missing.

    Raises DataError if the data is missing, damaged or made with other settings.
    """
    if isinstance(data, PythonStdlib):
        wanted = {
            "output": data.folder,
            "source": STDLIB,
            "tokenizer": data.tokenizer,
            "validation_fraction": data.validation_fraction,
            "processes": 1,  # a task may run in a process that must not have children; it takes only seconds
        }
        return prepare(PrepareArguments.model_validate(wanted), quiet=True)
    return read_header(Path(data.folder))


TASK = LanguageModelling
