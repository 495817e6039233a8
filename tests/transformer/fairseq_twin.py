"""fairseq's model and beam search with the weights of ours, to compare with."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from transformer import fairseq_compat  # before anything of fairseq: it makes it importable
from transformer.model import PAD, Attention, Transformer
from transformer.search import Search


def twin_of(model: Transformer, dictionary: Any) -> torch.nn.Module:
    """fairseq's post-LN Transformer with the same sizes and weights, in evaluation mode, without dropout."""
    from fairseq.models.transformer import TransformerModel, base_architecture

    width, layer = model.embedding.embedding_dim, model.encoder[0]
    hidden, heads = layer.feed_forward.hidden.out_features, layer.attention.heads
    arguments = SimpleNamespace(
        encoder_embed_dim=width,
        encoder_ffn_embed_dim=hidden,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_layers=len(model.encoder),
        decoder_layers=len(model.decoder),
        share_all_embeddings=True,
        dropout=0.0,
        max_source_positions=1024,
        max_target_positions=1024,
    )
    base_architecture(arguments)
    twin = TransformerModel.build_model(
        arguments, SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    )
    twin.encoder.embed_tokens.weight.data.copy_(model.embedding.weight)
    for ours, theirs in zip(model.encoder, twin.encoder.layers, strict=True):
        theirs.can_use_fastpath = False  # its fused layer dies in torch >= 2 with "Mask Type should be defined"
        copy_attention(ours.attention, theirs.self_attn)
        copy(ours.feed_forward.hidden, theirs.fc1)
        copy(ours.feed_forward.output, theirs.fc2)
        copy(ours.residuals[0].norm, theirs.self_attn_layer_norm)
        copy(ours.residuals[1].norm, theirs.final_layer_norm)
    for ours, theirs in zip(model.decoder, twin.decoder.layers, strict=True):
        copy_attention(ours.attention, theirs.self_attn)
        copy_attention(ours.source_attention, theirs.encoder_attn)
        copy(ours.feed_forward.hidden, theirs.fc1)
        copy(ours.feed_forward.output, theirs.fc2)
        copy(ours.residuals[0].norm, theirs.self_attn_layer_norm)
        copy(ours.residuals[1].norm, theirs.encoder_attn_layer_norm)
        copy(ours.residuals[2].norm, theirs.final_layer_norm)
    return twin.eval()


def copy(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Weight and bias of a linear layer or a norm."""
    theirs.load_state_dict(ours.state_dict())


def copy_attention(ours: Attention, theirs: torch.nn.Module) -> None:
    """Projections; ours keeps keys and values in one matrix."""
    keys, values = ours.key_value.weight.chunk(2)
    key_bias, value_bias = ours.key_value.bias.chunk(2)
    copy(ours.query, theirs.q_proj)
    copy(ours.output, theirs.out_proj)
    theirs.k_proj.load_state_dict({"weight": keys, "bias": key_bias})
    theirs.v_proj.load_state_dict({"weight": values, "bias": value_bias})


def dictionary_of(vocabulary: int) -> Any:
    """Return a fairseq dictionary of `vocabulary` tokens, whose words mean nothing."""
    words = fairseq_compat.Dictionary()
    for number in range(vocabulary - len(words)):
        words.add_symbol(f"word{number}")
    return words


def generator_of(model: Transformer, search: Search) -> Any:
    """fairseq's SequenceGenerator with the weights of ours; `generate` it with `sample_of` a source."""
    from fairseq.sequence_generator import SequenceGenerator

    dictionary = dictionary_of(model.embedding.num_embeddings)
    return SequenceGenerator(
        [twin_of(model, dictionary)],
        dictionary,
        beam_size=search.beam,
        max_len_a=1,
        max_len_b=search.extra_length,
        len_penalty=search.length_penalty,
    )


def sample_of(source: Tensor) -> dict[str, Any]:
    """Return sources [B, S] with padding on the right as SequenceGenerator takes them."""
    return {"net_input": {"src_tokens": move_padding_left(source), "src_lengths": (source != PAD).sum(1)}}


def move_padding_left(tokens: Tensor) -> Tensor:
    """fairseq pads sources on the left: [B, S] with padding on the right -> on the left."""
    lengths = (tokens != PAD).sum(1)
    return torch.stack([row.roll(len(row) - int(length)) for row, length in zip(tokens, lengths, strict=True)])
