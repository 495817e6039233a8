"""The paper's variant of the model against torch.nn.Transformer with the same weights, which the paper's code wraps."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.transformer.conftest import VOCABULARY
from tests.transformer.test_model import example
from tests.transformer.torch_twin import TorchTwin
from transformer.model import PAD, Attention, FeedForward, Transformer, cross_entropy, interleaved_sinusoids, mask_of
from transformer.search import Search, beam_search

HIGH = 0.5


def paper_model(dropout: float = 0.0) -> Transformer:
    """Return a small model whose weights are not near any symmetry."""
    torch.manual_seed(0)
    model = Transformer(VOCABULARY, 32, 64, 4, encoder_layers=2, decoder_layers=3, dropout=dropout, variant="paper")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("padded", [True, False])
def test_it_is_torchs_transformer_in_evaluation(padded: bool) -> None:
    model = paper_model(dropout=0.1).eval()
    twin = TorchTwin(model, 0.1).eval()
    source, target_input, target = example(padded)
    with torch.no_grad():
        ours = model(source, target_input, mask_of(source) if padded else None)
        theirs = twin(source, target_input)
    assert ours.std() > 0.5
    assert (ours - theirs)[target != PAD].abs().max() < 1e-5


def test_its_gradients_are_those_of_torchs_transformer() -> None:
    model = paper_model()
    twin = TorchTwin(model, 0.0)
    source, target_input, target = example(padded=True)
    cross_entropy(model(source, target_input, mask_of(source)), target, 0.1).backward()
    cross_entropy(twin(source, target_input), target, 0.1).backward()
    theirs = twin.transformer
    query, keys, values = theirs.decoder.layers[1].multihead_attn.in_proj_weight.grad.chunk(3)
    layer = model.decoder[1]
    gradients = [
        (model.embedding.weight.grad, twin.embedding.weight.grad),
        (model.encoder_norm.weight.grad, theirs.encoder.norm.weight.grad),
        (model.decoder_norm.bias.grad, theirs.decoder.norm.bias.grad),
        (layer.source_attention.query.weight.grad, query),
        (layer.source_attention.key_value.weight.grad, torch.cat([keys, values])),
        (model.encoder[0].feed_forward.hidden.weight.grad, theirs.encoder.layers[0].linear1.weight.grad),
        (layer.residuals[2].norm.weight.grad, theirs.decoder.layers[1].norm3.weight.grad),
    ]
    for ours, other in gradients:
        assert other.abs().max() > 1e-3
        assert (ours - other).abs().max() < 1e-4 * max(1.0, other.abs().max().item())


def test_initial_weights_are_drawn_as_torchs() -> None:
    """Weights have the ranges of nn.Transformer and of embeddings in U(-0.1, 0.1), the row of padding included."""
    torch.manual_seed(0)
    model = Transformer(1000, 64, 128, 4, 2, 2, 0.1, variant="paper")
    theirs = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
    attention, layer = model.encoder[0].attention, theirs.encoder.layers[0]
    ours_and_theirs: list[tuple[Tensor, Tensor]] = [
        (attention.query.weight, layer.self_attn.in_proj_weight),
        (attention.key_value.weight, layer.self_attn.in_proj_weight),
        (attention.key_value.bias, layer.self_attn.in_proj_bias),
        (attention.output.weight, layer.self_attn.out_proj.weight),
        (attention.output.bias, layer.self_attn.out_proj.bias),
        (model.decoder[1].feed_forward.hidden.weight, theirs.decoder.layers[1].linear1.weight),
        (model.decoder[1].feed_forward.hidden.bias, theirs.decoder.layers[1].linear1.bias),
        (model.decoder[1].feed_forward.output.bias, theirs.decoder.layers[1].linear2.bias),
        (model.decoder_norm.weight, theirs.decoder.norm.weight),
    ]
    for ours, other in ours_and_theirs:
        assert ours.abs().max().item() == pytest.approx(other.abs().max().item(), rel=0.06)
    assert model.embedding.weight.abs().max().item() == pytest.approx(0.1, rel=1e-3)
    assert model.embedding.weight[PAD].abs().max() > 0.08


def test_positions_are_those_of_vaswani_et_al() -> None:
    found = interleaved_sinusoids(3, 2, 8, torch.device("cpu"))
    for row, position in zip(found.tolist(), (3, 4), strict=True):
        angles = [position / 10_000 ** (2 * i / 8) for i in range(4)]
        expected = [value for angle in angles for value in (math.sin(angle), math.cos(angle))]
        assert row == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("variant", "drops"), [("paper", True), ("fairseq", False)])
def test_dropout_acts_on_attention_weights_and_inside_the_feed_forward(variant: str, drops: bool) -> None:
    model = Transformer(50, 16, 32, 2, 1, 1, dropout=HIGH, variant=variant)
    x = torch.randn(3, 5, 16)
    encoder, decoder = model.encoder[0], model.decoder[0]
    sublayers: list[Attention | FeedForward] = [encoder.attention, decoder.attention, decoder.source_attention]
    sublayers += [encoder.feed_forward, decoder.feed_forward]
    for sublayer in sublayers:

        def output(sublayer: Attention | FeedForward = sublayer) -> Tensor:
            return sublayer(x, sublayer.project(x)) if isinstance(sublayer, Attention) else sublayer(x)

        sublayer.train()
        assert torch.equal(output(), output()) != drops
        sublayer.eval()
        assert torch.equal(output(), output())


def test_dropout_falls_on_the_weights_not_on_the_values() -> None:
    """With one key, attention either takes its value, scaled by 1 / (1 - p), or nothing at all, for each head."""
    torch.manual_seed(0)
    attention = Attention(8, 2, HIGH)
    attention.output = nn.Identity()
    x = torch.randn(200, 1, 8)
    with torch.no_grad():
        memory = attention.project(x)
        heads = attention(x, memory).view(200, 2, 4)
    whole = memory.values[:, :, 0] / (1 - HIGH)
    kept = (heads - whole).abs().amax(2) < 1e-5
    assert (kept | (heads.abs().amax(2) == 0)).all()
    assert kept.float().mean().item() == pytest.approx(1 - HIGH, abs=0.1)


def test_the_search_finds_what_the_whole_decoder_says() -> None:
    """Decoding token by token ends with the same final norm and positions as decoding a sentence at once."""
    model = paper_model().eval()
    source, _, _ = example(padded=True)
    search = Search(beam=1, extra_length=3)
    for row, (best, *_) in enumerate(beam_search(model, source, mask_of(source), search)):
        tokens = torch.tensor([[2, *best.tokens]])
        length = int((source[row] != PAD).sum())
        log_probabilities = model(source[row : row + 1, :length], tokens).log_softmax(-1)[0]
        following = torch.tensor([*best.tokens, 2])
        total = log_probabilities.gather(1, following[:, None]).sum().item()
        assert best.score == pytest.approx(total / len(following) ** search.length_penalty, rel=1e-4)
