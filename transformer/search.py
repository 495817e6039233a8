"""Batched beam search with cached keys and values.

The search is fairseq's (`SequenceGenerator`), so that hypotheses agree token by token:

- The score of a hypothesis is (sum of its tokens' log-probabilities, EOS included) / length ** length_penalty.
- In each step the 2 x beam best continuations of a sentence are its candidates. Of the best `beam` candidates, those
  that end in EOS become finished hypotheses; the best `beam` candidates without EOS are continued.
- A sentence is done, and leaves the batch, as soon as it has `beam` finished hypotheses.
- A hypothesis has at most as many tokens as its source (EOS included) + extra_length; then EOS is forced.

One thing differs: fairseq takes the longest source of the batch for that limit, so its result may depend on which
sentences share a batch. Here each sentence has its own limit.

Shapes: N open sentences, K hypotheses of each (1 in the first step, then the beam), C = 2 x beam candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.transfer import to_device
from transformer.model import PAD, KeysValues, Transformer

EOS = 2  # fairseq's index of the end of a sentence; it also begins the target
NEVER = float("-inf")


@dataclass(frozen=True)
class Search:
    """Settings of the search.

    beam:           hypotheses kept per sentence
    length_penalty: exponent of the length by which a score is divided
    extra_length:   tokens by which a target may be longer than its source
    """

    beam: int = 4
    length_penalty: float = 0.6
    extra_length: int = 50


@dataclass(frozen=True)
class Hypothesis:
    """A translation: its tokens without EOS and its score."""

    tokens: tuple[int, ...]
    score: float


@torch.no_grad()
def beam_search(
    model: Transformer, source: Tensor, source_mask: Tensor | None = None, search: Search | None = None
) -> list[list[Hypothesis]]:
    """Return the finished hypotheses of each sentence of source [B, S] (with EOS, padded on the right), best first.

    The model must be in evaluation mode. Raises ValueError if the vocabulary is too small for the beam.
    """
    search = search or Search()
    vocabulary = model.embedding.num_embeddings
    if vocabulary <= 2 * search.beam:
        raise ValueError(f"beam={search.beam}: expected less than half of the {vocabulary} tokens of the vocabulary")
    limits = (source != PAD).sum(1) + search.extra_length  # tokens before EOS
    longest = int(limits.max()) + 1  # with EOS
    decoder = IncrementalDecoder(model, source, source_mask, search.beam, longest)
    finished: list[list[Hypothesis]] = [[] for _ in range(len(source))]
    sentences = list(range(len(source)))  # the open ones
    tokens = source.new_full((len(source), 1, 1), EOS)  # [N, K, step + 1]
    scores = torch.zeros(len(source), 1, device=source.device)  # [N, K]
    for step in range(longest):
        log_probabilities = decoder.step(tokens[:, :, -1]).float().log_softmax(-1)  # [N, K, V]
        constrain(log_probabilities, step, limits)
        totals = (scores[:, :, None] + log_probabilities).flatten(1)  # [N, K x V]
        totals, flat = totals.topk(2 * search.beam)  # [N, C]
        parents, chosen = flat // vocabulary, flat % vocabulary
        ends = (chosen == EOS) & (totals > NEVER)
        collect(finished, sentences, tokens, totals, parents, ends[:, : search.beam], search)
        # A stable sort moves the finished candidates to the end and keeps the others in the order of their scores.
        alive = ends.byte().argsort(dim=1, stable=True)[:, : search.beam]  # [N, beam]
        open_rows = [row for row, sentence in enumerate(sentences) if len(finished[sentence]) < search.beam]
        if not open_rows:
            break
        if len(open_rows) < len(sentences):
            sentences = [sentences[row] for row in open_rows]
            rows = to_device(torch.tensor(open_rows), source.device)
            totals, chosen, alive, limits = totals[rows], chosen[rows], alive[rows], limits[rows]
            decoder.keep_sentences(rows)
        else:
            rows = torch.arange(len(sentences), device=source.device)
        # Indices of the continued hypotheses among the N x K of this step, [N, beam].
        continued = rows[:, None] * tokens.shape[1] + parents[rows].gather(1, alive)
        decoder.keep_hypotheses(continued.flatten())
        scores = totals.gather(1, alive)
        tokens = torch.cat([tokens.flatten(0, 1)[continued], chosen.gather(1, alive)[:, :, None]], dim=2)
    # Without finite logits nothing is ever finished.
    none = [Hypothesis((), NEVER)]
    return [sorted(hypotheses, key=lambda h: -h.score) or none for hypotheses in finished]


def constrain(log_probabilities: Tensor, step: int, limits: Tensor) -> None:
    """Forbid padding, empty hypotheses, and all but EOS at a sentence's limit, in place; [N, K, V] and limits [N]."""
    log_probabilities[:, :, PAD] = NEVER
    if step == 0:
        log_probabilities[:, :, EOS] = NEVER
    at_limit = limits == step
    # No test whether any sentence is at its limit: it would make the CPU wait for the device.
    end = log_probabilities[:, :, EOS].clone()
    log_probabilities.masked_fill_(at_limit[:, None, None], NEVER)
    log_probabilities[:, :, EOS] = end


def collect(
    finished: list[list[Hypothesis]],
    sentences: Sequence[int],
    tokens: Tensor,
    totals: Tensor,
    parents: Tensor,
    ends: Tensor,
    search: Search,
) -> None:
    """Add the finished candidates to the hypotheses of their sentences, at most `beam` each.

    tokens [N, K, length + 1] begin with EOS; totals and parents [N, C]; ends [N, beam].
    """
    ended = ends.nonzero()  # row by row, best first
    if not len(ended):
        return
    rows, ranks = ended.unbind(1)
    values = totals[rows, ranks] / tokens.shape[2] ** search.length_penalty
    texts = tokens[rows, parents[rows, ranks], 1:]
    for row, value, text in zip(rows.tolist(), values.tolist(), texts.tolist(), strict=True):
        hypotheses = finished[sentences[row]]
        if len(hypotheses) < search.beam:
            hypotheses.append(Hypothesis(tuple(text), value))


class IncrementalDecoder:
    """Decoder of one token at a time, for K hypotheses of each of N sentences.

    All hypotheses of a sentence share the keys and values of its source [N, H, S, D/H] and act as K queries of one
    attention. The keys and values of the hypotheses' own tokens are in one buffer [length x N x K, layers, 2, H, D/H]:
    one row holds all layers of a hypothesis at one position, so that one copy of rows reorders everything. Rows are
    copied back and forth between two such buffers.

    hypotheses: largest number of hypotheses of a sentence
    length:     largest number of tokens
    """

    def __init__(
        self, model: Transformer, source: Tensor, source_mask: Tensor | None, hypotheses: int, length: int
    ) -> None:
        self._model, self._mask = model, source_mask
        memory = model.encode(source, source_mask)
        self._source = [layer.source_attention.project(memory) for layer in model.decoder]
        heads, size = self._source[0].keys.shape[1], self._source[0].keys.shape[3]
        row = (len(model.decoder), 2, heads, size)
        self._own, self._spare = (memory.new_empty(length * len(source) * hypotheses, *row) for _ in range(2))
        self._open, self._done = len(source), 0  # current N x K, and tokens of each

    def step(self, tokens: Tensor) -> Tensor:
        """Map the last tokens [N, K] of all hypotheses to the logits [N, K, V] of the next ones."""
        x = self._model.embed(tokens.reshape(-1, 1), self._done)  # [N x K, 1, D]
        self._done += 1
        own = self._own[: self._done * self._open].unflatten(0, (self._done, self._open))
        for number, layer in enumerate(self._model.decoder):
            for part, new in enumerate(layer.attention.project(x)):  # [N x K, H, 1, D/H]
                own[-1, :, number, part] = new[:, :, 0]
            known = KeysValues(*own[:, :, number].permute(2, 1, 3, 0, 4))  # [N x K, H, done, D/H]
            x = layer.residuals[0](x, layer.attention(x, known))
            x = layer.look_at_source(x.view(*tokens.shape, -1), self._source[number], self._mask).view_as(x)
        return self._model.logits(x).view(*tokens.shape, -1)

    def keep_sentences(self, rows: Tensor) -> None:
        """Drop all other sentences; `keep_hypotheses` must follow."""
        self._mask = None if self._mask is None else self._mask[rows]
        self._source = [KeysValues(*(tensor[rows] for tensor in pair)) for pair in self._source]

    def keep_hypotheses(self, continued: Tensor) -> None:
        """Let hypothesis k continue hypothesis continued[k]; continued [N x K of the next step]."""
        begins = torch.arange(self._done, device=continued.device)[:, None] * self._open
        rows = (begins + continued).flatten()
        torch.index_select(self._own, 0, rows, out=self._spare[: len(rows)])
        self._own, self._spare = self._spare, self._own
        self._open = len(continued)
