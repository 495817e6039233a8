"""GPT-2 (Radford et al. 2019): a causal transformer decoder with pre-norm layers and tied embeddings."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt2.config import Shape

INIT_STD = 0.02


class Attention(nn.Module):
    """Causal multi-head self-attention; [B, T, C] -> [B, T, C]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.project = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, C] to [B, T, C]."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, heads, T, C / heads]
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return F.dropout(self.project(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)


class FeedForward(nn.Module):
    """Two linear layers with GELU between them; [B, T, C] -> [B, T, C]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dropout, self.approximate = shape.dropout, "tanh" if shape.gelu == "tanh" else "none"
        self.expand = nn.Linear(shape.width, 4 * shape.width, bias=shape.bias)
        self.project = nn.Linear(4 * shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, C] to [B, T, C]."""
        hidden = F.gelu(self.expand(x), approximate=self.approximate)  # [B, T, 4 C]
        return F.dropout(self.project(hidden), self.dropout, self.training)


class Block(nn.Module):
    """Attention and feed-forward, each behind a LayerNorm and around a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, bias=shape.bias)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width, bias=shape.bias)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, C] to [B, T, C]."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class GPT2(nn.Module):
    """The language model, from tokens to logits or to the loss.

    The output layer is the transposed token embedding: one parameter, which is initialised, decayed and mixed once.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=shape.bias)
        self._initialise()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Map tokens [B, T] int64, T <= context, to logits [B, T, vocabulary].

        With targets [B, T] int64, return their mean cross-entropy in nats, a scalar, instead; model and loss are one
        graph, so that torch.compile fuses the loss too. Raises ValueError if T > context.
        """
        length = tokens.shape[1]
        if length > self.shape.context:
            raise ValueError(f"a sequence of {length} tokens, expected at most context={self.shape.context}")
        x = self.tokens(tokens) + self.positions.weight[:length]  # [B, T, C]
        x = F.dropout(x, self.shape.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _initialise(self) -> None:
        """Initialise as GPT-2: normal, std 0.02, divided by sqrt(2 layers) where a residual branch ends; biases 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            for last in (block.attention.project, block.feed_forward.project):
                nn.init.normal_(last.weight, std=INIT_STD / math.sqrt(2 * self.shape.layers))


def parameter_count(shape: Shape) -> int:
    """Count the parameters of the model, the tied embedding once."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT2(shape).parameters())


def flops_per_token(shape: Shape) -> float:
    """Return the floating point operations of forward and backward for one token of a full context.

    6 N + 12 layers width context (PaLM, arXiv 2204.02311, appendix B): 6 for each parameter in a matrix product (all
    but the position table), and the two products of attention, counted as if without causal mask.
    """
    multiplied = parameter_count(shape) - shape.context * shape.width
    return 6 * multiplied + 12 * shape.layers * shape.width * shape.context
