"""Translation as a task for the training loop: model, data, loss and metrics."""

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from common.config.config import ConfigError
from common.training.task import Task
from transformer.config import TrainedConfig, TransformerConfig
from transformer.corpus import Corpus, check_folder
from transformer.data import Batch, ParallelText, TokenBatches, evaluation_batches
from transformer.model import PAD, Transformer, cross_entropy
from transformer.prepare import make_embedded
from transformer.scores import BLEU_SUMS, bleu_of, bleu_sums, meteor, wordnet_problem
from transformer.search import Search, beam_search

LOSS_SUMS = ("loss", "loss_smoothed", "tokens")
METEOR_SUMS = ("meteor", "lines", "lines_without_meteor")


class Translation(Task):
    """Translation, evaluated by the loss per target token in nats and optionally by BLEU and METEOR.

    Batches are measured in tokens: training.batch_size limits the source tokens, and the target tokens, of all ranks
    in one update, evaluation.batch_size those of one process in one batch.
    """

    config_class = TransformerConfig
    primary_metric = "loss"
    higher_is_better = False
    late_imports = ("transformer.fairseq_compat", "sacrebleu", "sacremoses", "nltk.translate.meteor_score")

    def __init__(self, config: TransformerConfig) -> None:
        self._config = config
        if config.data.name == "number_names":
            make_embedded(config.data)
        self._corpus = Corpus(config.data)
        if config.decoding.in_training:
            check_beam(config.decoding.beam, self._corpus.vocabulary)
        self._train = self._corpus.split("train", config.data.max_length)
        self._validation: ParallelText = self._corpus.evaluated("valid")
        self.sums = LOSS_SUMS + ((*BLEU_SUMS, *METEOR_SUMS) if config.decoding.in_training else ())

    @classmethod
    def check_files(cls, config: TransformerConfig) -> None:
        """Raise ConfigError if there is no folder of texts, unless it is made on first use."""
        if config.data.name != "number_names":
            check_folder(config.data)

    def build_model(self) -> nn.Module:
        """Build the configured Transformer."""
        return build_model(self._config, self._corpus.vocabulary)

    def train_data(self, worker: int, workers: int, batch_size: int, device: torch.device) -> TokenBatches:
        """Return this rank's batches of about `batch_size` tokens."""
        config = self._config
        return TokenBatches(self._train, worker, workers, batch_size, config.seed, device, config.token_limit)

    def evaluation_data(self, shard: int, shards: int, batch_size: int, device: torch.device) -> Iterator[Batch]:
        """Return the batches of this shard of the validation set."""
        return evaluation_batches(self._validation, shard, shards, batch_size, device)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return none: the beam search reaches into the layers."""
        return []

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the smoothed cross-entropy per target token.

        With loss_divisor=mean_tokens, the sum over the batch's tokens is divided by a constant, the mean number of
        tokens in a batch. So every token counts the same in any batch and on any rank: the mean over ranks that
        all-reduce takes is, up to that constant, the gradient of the mean over all their tokens. Dividing by the
        batch's own number of tokens, as the paper's code does, gives the tokens of small batches more weight.
        """
        own = self._config.loss_divisor == "own_tokens"
        tokens = (batch.target != PAD).sum() if own else batch.mean_target_tokens
        logits = model(batch.source, batch.target_input, batch.source_mask)
        return self._cross_entropy(logits, batch.target, self._config.label_smoothing) / tokens

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return sums over the target tokens of a batch and, if configured, the statistics of its translations."""
        logits = model(batch.source, batch.target_input, batch.source_mask)
        sums = {
            "loss": self._cross_entropy(logits, batch.target, 0.0),
            "loss_smoothed": self._cross_entropy(logits, batch.target, self._config.label_smoothing),
            "tokens": (batch.target != PAD).sum(),
        }
        if self._config.decoding.in_training:
            device = batch.source.device
            sums |= {name: torch.full((), v, device=device) for name, v in self._translate(model, batch).items()}
        return sums

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return losses in nats per target token and, if configured, BLEU (sacreBLEU) and METEOR (nltk)."""
        found = {name: sums[name] / sums["tokens"] for name in ("loss", "loss_smoothed")}
        if self._config.decoding.in_training:
            found["bleu"] = bleu_of(sums)
            if not sums["lines_without_meteor"]:
                found["meteor"] = sums["meteor"] / sums["lines"]
        return found

    def samples(self, data: TokenBatches) -> float:
        """Return the mean number of target tokens in a local batch, padding excluded; it varies between batches."""
        return data.mean_target_tokens

    def _cross_entropy(self, logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
        return cross_entropy(logits, target, smoothing, self._config.smoothed_over)

    def _translate(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        """Translate the batch and return the sums behind BLEU and METEOR of the best hypotheses."""
        found = beam_search(model, batch.source, batch.source_mask, search_of(self._config))
        hypotheses = [self._corpus.line(best.tokens) for best, *_ in found]
        references = [self._references[i] for i in batch.sentences]
        lines = len(references)
        scored = wordnet_problem() is None
        total = lines * meteor(hypotheses, references) if scored else 0.0
        sums = {"meteor": total, "lines": lines, "lines_without_meteor": 0 if scored else lines}
        return bleu_sums(hypotheses, references) | sums

    @cached_property
    def _references(self) -> list[str]:
        return self._corpus.references("valid")[0]


def build_model(config: TransformerConfig | TrainedConfig, vocabulary: int) -> Transformer:
    """Build the configured model for a vocabulary of this size."""
    size = config.model.model_dump(exclude={"name"})
    return Transformer(vocabulary, **size)


def search_of(config: TransformerConfig | TrainedConfig) -> Search:
    """Return the configured beam search."""
    return Search(config.decoding.beam, config.decoding.length_penalty, config.decoding.extra_length)


def check_beam(beam: int, vocabulary: int, key: str = "decoding.beam") -> None:
    """Raise ConfigError if a vocabulary is too small for a beam."""
    if vocabulary <= 2 * beam:
        raise ConfigError(f"{key}={beam}: expected less than half of the {vocabulary} tokens of the vocabulary")


TASK = Translation
