"""torch.nn.Transformer with the weights of our model's paper variant, to compare with: the form of the paper's code."""

import math

import torch
from torch import Tensor, nn

from transformer.model import PAD, Attention, Transformer, interleaved_sinusoids


class TorchTwin(nn.Module):
    """nn.Transformer (post-LN, as it is by default) between tied embeddings."""

    def __init__(self, model: Transformer, dropout: float) -> None:
        super().__init__()
        vocabulary, self.width = model.embedding.weight.shape
        layer = model.encoder[0]
        self.embedding = nn.Embedding(vocabulary, self.width, padding_idx=PAD)
        self.transformer = nn.Transformer(
            self.width,
            layer.attention.heads,
            len(model.encoder),
            len(model.decoder),
            layer.feed_forward.hidden.out_features,
            dropout,
            batch_first=True,
        )
        self.dropout = nn.Dropout(dropout)
        copy_weights(model, self)

    def forward(self, source: Tensor, target_input: Tensor) -> Tensor:
        """Return logits [B, T, V] for source [B, S] and target_input [B, T], padded on the right."""
        padding = source == PAD
        causal = self.transformer.generate_square_subsequent_mask(target_input.shape[1]).isinf()
        x = self.transformer(
            self.embed(source),
            self.embed(target_input),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return x @ self.embedding.weight.T

    def embed(self, tokens: Tensor) -> Tensor:
        """Return scaled embeddings with positions, after dropout."""
        positions = interleaved_sinusoids(0, tokens.shape[1], self.width, tokens.device)
        return self.dropout(self.embedding(tokens) * math.sqrt(self.width) + positions)


def copy_weights(model: Transformer, twin: TorchTwin) -> None:
    """Give the twin our model's weights."""
    theirs = twin.transformer
    pairs: list[tuple[nn.Module, nn.Module]] = [
        (model.embedding, twin.embedding),
        (model.encoder_norm, theirs.encoder.norm),
        (model.decoder_norm, theirs.decoder.norm),
    ]
    ours, others = (*model.encoder, *model.decoder), (*theirs.encoder.layers, *theirs.decoder.layers)
    for layer, other in zip(ours, others, strict=True):
        norms = [getattr(other, f"norm{number}") for number in (1, 2, 3) if hasattr(other, f"norm{number}")]
        pairs += [(layer.feed_forward.hidden, other.linear1), (layer.feed_forward.output, other.linear2)]
        pairs += [(residual.norm, norm) for residual, norm in zip(layer.residuals, norms, strict=True)]
        copy_attention(layer.attention, other.self_attn)
        if hasattr(layer, "source_attention"):
            copy_attention(layer.source_attention, other.multihead_attn)
    for module, other in pairs:
        other.load_state_dict(module.state_dict())


@torch.no_grad()
def copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    """Copy the projections; torch keeps query, key and value in one matrix."""
    theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key_value.weight]))
    theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key_value.bias]))
    theirs.out_proj.load_state_dict(ours.output.state_dict())
