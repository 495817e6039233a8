"""The model against fairseq's with the same weights, and against its own definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.transformer.conftest import VOCABULARY
from transformer.model import PAD, Transformer, cross_entropy, mask_of, sinusoids

EOS = 2


def sentences(lengths: list[int], seed: int) -> Tensor:
    """Random sentences with EOS, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(tokens, lengths, strict=True):
        row[:length] = torch.randint(4, VOCABULARY, (length,), generator=generator)
        row[length - 1] = EOS
    return tokens


def example(padded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """source, target_input, target"""
    source = sentences([7, 3, 9, 5] if padded else [8, 8, 8, 8], seed=1)
    target = sentences([6, 11, 4, 2], seed=2)
    return source, torch.cat([torch.full((4, 1), EOS), target[:, :-1]], dim=1), target


@pytest.mark.parametrize("padded", [True, False])
def test_logits_loss_and_gradients_are_fairseqs(model: Transformer, dictionary: Any, padded: bool) -> None:
    from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss

    from tests.transformer.fairseq_twin import move_padding_left, twin_of

    twin = twin_of(model, dictionary)
    source, target_input, target = example(padded)
    ours = model(source, target_input, mask_of(source) if padded else None)
    lengths = (source != PAD).sum(1)
    theirs, _ = twin(src_tokens=move_padding_left(source), src_lengths=lengths, prev_output_tokens=target_input)
    real = target != PAD
    assert (ours - theirs)[real].abs().max() < 1e-5

    loss = cross_entropy(ours, target, 0.1)
    log_probabilities = theirs.log_softmax(-1).flatten(0, 1)
    their_loss, their_plain = label_smoothed_nll_loss(log_probabilities, target.flatten(), 0.1, ignore_index=PAD)
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-6)
    assert cross_entropy(ours, target, 0.0).item() == pytest.approx(their_plain.item(), rel=1e-6)

    loss.backward()
    their_loss.backward()
    layer, their_layer = model.decoder[1], twin.decoder.layers[1]
    gradients = [
        (model.embedding.weight.grad, twin.encoder.embed_tokens.weight.grad),
        (model.encoder[0].attention.query.weight.grad, twin.encoder.layers[0].self_attn.q_proj.weight.grad),
        (layer.source_attention.key_value.weight.grad.chunk(2)[0], their_layer.encoder_attn.k_proj.weight.grad),
        (layer.attention.key_value.weight.grad.chunk(2)[1], their_layer.self_attn.v_proj.weight.grad),
        (layer.feed_forward.output.bias.grad, their_layer.fc2.bias.grad),
        (layer.residuals[1].norm.weight.grad, their_layer.encoder_attn_layer_norm.weight.grad),
    ]
    for mine, other in gradients:
        assert other.abs().max() > 1e-3
        assert (mine - other).abs().max() < 1e-5 * max(1.0, other.abs().max().item())


def test_sinusoids_are_fairseqs(compat: Any) -> None:
    from fairseq.modules import SinusoidalPositionalEmbedding

    ours = sinusoids(0, 200, 32, torch.device("cpu"))
    theirs = SinusoidalPositionalEmbedding(32, PAD, 300)(torch.full((1, 200), 5))[0]
    assert (ours - theirs).abs().max() < 1e-4  # float32 angles up to 200
    assert torch.equal(sinusoids(7, 3, 32, torch.device("cpu")), ours[7:10])


@pytest.mark.parametrize(
    ("size", "vocabulary", "millions"), [((512, 2048, 8, 6, 6), 37_000, 63.1), ((1024, 4096, 16, 6, 6), 37_000, 214.3)]
)
def test_base_and_big_have_the_published_sizes(size: tuple[int, ...], vocabulary: int, millions: float) -> None:
    with torch.device("meta"):
        model = Transformer(vocabulary, *size, dropout=0.1)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


def test_initial_logits_are_of_order_one_and_projections_as_fairseqs() -> None:
    torch.manual_seed(0)
    model = Transformer(1000, 64, 128, 4, 2, 2, 0.1)
    keys, values = model.encoder[0].attention.key_value.weight.chunk(2)
    for matrix in (model.encoder[0].attention.query.weight, keys, values):
        assert matrix.std().item() == pytest.approx((1 / 128) ** 0.5, rel=0.05)  # gain 1/sqrt 2: variance 1/(2D)
    assert 0.3 < model(torch.randint(4, 1000, (8, 9)), torch.randint(4, 1000, (8, 9))).std() < 3
    assert model.embedding.weight[PAD].abs().sum() == 0


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    model = Transformer(50, 16, 32, 2, 1, 1, dropout=0.3, attention_dropout=0.3)
    source = torch.randint(4, 50, (4, 6))
    assert not torch.equal(model(source, source), model(source, source))
    model.eval()
    assert torch.equal(model(source, source), model(source, source))
