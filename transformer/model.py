"""The Transformer of Vaswani et al. (2017): post-LN encoder and decoder, all embeddings shared.

It comes in two variants. `fairseq` is fairseq's model; `paper` is the model in the code of arXiv 2410.11998, which
wraps torch.nn.Transformer (transformer/src/model.py there):

                          fairseq                          paper
    dropout               embeddings, sublayers' outputs   also attention weights, and inside the feed-forward
    final norms           none                             of the encoder and of the decoder
    positions             sines, then cosines; from 2      sines and cosines in turn; from 0
    initial embeddings    N(0, 1/D), padding 0             U(-0.1, 0.1)
    feed-forward biases   0                                U(-1/sqrt(inputs), 1/sqrt(inputs))

Shapes: B sentences, S source tokens, T target tokens, D width, H heads, V vocabulary. Sentences are padded on the
right with PAD. The decoder needs no padding mask, since causal tokens see only earlier ones and padding comes last. The
encoder's keys need one only if sentences of different lengths share a batch.
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD = 1  # fairseq's index of padding
LONGEST_WAVELENGTH = 10_000
UNIFORM_EMBEDDING = 0.1  # largest initial weight of an embedding in the paper's variant
Variant = Literal["fairseq", "paper"]
SmoothedOver = Literal["wrong_tokens", "all_tokens"]


class KeysValues(NamedTuple):
    """Keys and values of attention, both [B, H, tokens, D/H]."""

    keys: Tensor
    values: Tensor


class Attention(nn.Module):
    """Multi-head attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)
        # Query, key and value each get variance 1/(2D), as in fairseq; a fused matrix would get another variance.
        for matrix in (self.query.weight, *self.key_value.weight.chunk(2)):
            nn.init.xavier_uniform_(matrix, gain=2**-0.5)
        nn.init.xavier_uniform_(self.output.weight)
        for linear in (self.query, self.key_value, self.output):
            nn.init.zeros_(linear.bias)

    def project(self, memory: Tensor) -> KeysValues:
        """Compute the keys and values of memory [B, tokens, D]."""
        keys, values = self.key_value(memory).chunk(2, dim=-1)
        return KeysValues(self._split(keys), self._split(values))

    def forward(self, x: Tensor, memory: KeysValues, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Let x [B, T, D] attend to memory; mask broadcasts to [B, H, T, tokens], True where a query may look."""
        dropout = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(
            self._split(self.query(x)), memory.keys, memory.values, mask, dropout, is_causal=causal
        )
        return self.output(heads.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """Split [B, tokens, D] into heads, [B, H, tokens, D/H]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with a ReLU between them, followed by dropout in the paper's variant."""

    def __init__(self, width: int, hidden: int, dropout: float, variant: Variant) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout if variant == "paper" else 0.0)
        for linear in (self.hidden, self.output):
            nn.init.xavier_uniform_(linear.weight)
            if variant == "fairseq":
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., D] to [..., D]."""
        return self.output(self.dropout(F.relu(self.hidden(x))))


class Residual(nn.Module):
    """LayerNorm(x + dropout(update)), where update is a sublayer's output: the norm follows the sum (post-LN)."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x: Tensor, update: Tensor) -> Tensor:
        """Add update [..., D] to x [..., D] and normalise."""
        return self.norm(x + self.dropout(update))


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward network."""

    def __init__(
        self, width: int, hidden: int, heads: int, dropout: float, attention_dropout: float, variant: Variant
    ) -> None:
        super().__init__()
        self.attention = Attention(width, heads, attention_dropout)
        self.feed_forward = FeedForward(width, hidden, dropout, variant)
        self.residuals = nn.ModuleList(Residual(width, dropout) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map x [B, S, D] to [B, S, D]."""
        x = self.residuals[0](x, self.attention(x, self.attention.project(x), mask))
        return self.residuals[1](x, self.feed_forward(x))


class DecoderLayer(nn.Module):
    """Self-attention, attention to the source, then a feed-forward network."""

    def __init__(
        self, width: int, hidden: int, heads: int, dropout: float, attention_dropout: float, variant: Variant
    ) -> None:
        super().__init__()
        self.attention = Attention(width, heads, attention_dropout)
        self.source_attention = Attention(width, heads, attention_dropout)
        self.feed_forward = FeedForward(width, hidden, dropout, variant)
        self.residuals = nn.ModuleList(Residual(width, dropout) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None) -> Tensor:
        """Map x [B, T, D], given the encoder's memory [B, S, D], to [B, T, D]."""
        x = self.residuals[0](x, self.attention(x, self.attention.project(x), causal=True))
        return self.look_at_source(x, self.source_attention.project(memory), memory_mask)

    def look_at_source(self, x: Tensor, source: KeysValues, source_mask: Tensor | None) -> Tensor:
        """Apply the sublayers after self-attention to x [B, T, D]."""
        x = self.residuals[1](x, self.source_attention(x, source, source_mask))
        return self.residuals[2](x, self.feed_forward(x))


class Transformer(nn.Module):
    """Encoder and decoder over token sequences; `transformer.search` decodes with it.

    vocabulary:        V, of source and target together
    width:             D, divisible by heads and by 2
    dropout:           of embeddings and of each sublayer's output; in the paper's variant also inside the feed-forward
    attention_dropout: of attention weights; None: 0, or `dropout` in the paper's variant
    variant:           see above
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        hidden: int,
        heads: int,
        encoder_layers: int,
        decoder_layers: int,
        dropout: float,
        attention_dropout: float | None = None,
        variant: Variant = "fairseq",
    ) -> None:
        super().__init__()
        as_in_paper = variant == "paper"
        if attention_dropout is None:
            attention_dropout = dropout if as_in_paper else 0.0
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PAD)
        if as_in_paper:
            nn.init.uniform_(self.embedding.weight, -UNIFORM_EMBEDDING, UNIFORM_EMBEDDING)
        else:
            nn.init.normal_(self.embedding.weight, std=width**-0.5)
            nn.init.zeros_(self.embedding.weight[PAD])
        self.positions = interleaved_sinusoids if as_in_paper else sinusoids
        self.dropout = nn.Dropout(dropout)
        layer = (width, hidden, heads, dropout, attention_dropout, variant)
        self.encoder = nn.ModuleList(EncoderLayer(*layer) for _ in range(encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(*layer) for _ in range(decoder_layers))
        self.encoder_norm, self.decoder_norm = (nn.LayerNorm(width) if as_in_paper else nn.Identity() for _ in range(2))

    def forward(self, source: Tensor, target_input: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Return logits [B, T, V] of the token after each of target_input [B, T], given source [B, S].

        source_mask: `mask_of(source)`, or None if no source is padded
        """
        return self.decode(target_input, self.encode(source, source_mask), source_mask)

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Encode source [B, S] to memory [B, S, D]."""
        x = self.dropout(self.embed(source))
        for layer in self.encoder:
            x = layer(x, source_mask)
        return self.encoder_norm(x)

    def decode(self, target_input: Tensor, memory: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Map target_input [B, T] and memory [B, S, D] to logits [B, T, V]."""
        x = self.dropout(self.embed(target_input))
        for layer in self.decoder:
            x = layer(x, memory, source_mask)
        return self.logits(x)

    def embed(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Embed tokens [B, T], scaled, and add positions; the first token has position `first` in its sentence."""
        width = self.embedding.embedding_dim
        return self.embedding(tokens) * math.sqrt(width) + self.positions(first, tokens.shape[1], width, tokens.device)

    def logits(self, x: Tensor) -> Tensor:
        """Map the last layer's x [..., D] to logits [..., V]: the final norm, if any, and the transposed embedding."""
        return F.linear(self.decoder_norm(x), self.embedding.weight)


def mask_of(source: Tensor) -> Tensor:
    """Return a mask [B, 1, 1, S] that is True at the tokens of source [B, S] that are not padding."""
    return (source != PAD)[:, None, None, :]


def sinusoids(first: int, count: int, width: int, device: torch.device) -> Tensor:
    """Return the encodings [count, width] of positions first, first + 1, ...

    fairseq's convention: sines in the first half, cosines in the second, wavelengths from 2 pi to 10,000 x 2 pi
    inclusive, and the first token of a sentence is position PAD + 1.
    """
    half = width // 2
    step = math.log(LONGEST_WAVELENGTH) / (half - 1)
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32, device=device) * -step)
    positions = torch.arange(PAD + 1 + first, PAD + 1 + first + count, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def interleaved_sinusoids(first: int, count: int, width: int, device: torch.device) -> Tensor:
    """Return the encodings [count, width] of positions first, first + 1, ... as in the paper's code.

    Vaswani et al.'s convention: sines at even and cosines at odd features, wavelengths from 2 pi to almost 10,000 x
    2 pi, and the first token of a sentence is position 0.
    """
    step = 2 * math.log(LONGEST_WAVELENGTH) / width
    frequencies = torch.exp(torch.arange(width // 2, dtype=torch.float32, device=device) * -step)
    positions = torch.arange(first, first + count, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)


def cross_entropy(logits: Tensor, target: Tensor, smoothing: float, over: SmoothedOver = "wrong_tokens") -> Tensor:
    """Return the label-smoothed cross-entropy in nats, summed over target [B, T] except padding; logits [B, T, V].

    smoothing: the probability that is taken from the true token
    over:      the tokens that share it equally: the V - 1 others (fairseq), or all V (PyTorch, and the paper's code)
    """
    vocabulary = logits.shape[-1]
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        target.flatten(),
        ignore_index=PAD,
        reduction="sum",
        label_smoothing=smoothing * vocabulary / (vocabulary - 1) if over == "wrong_tokens" else smoothing,
    )
