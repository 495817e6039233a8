"""GPT-2: against Hugging Face's, its size, its arithmetic, its start."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.launch.compose import compose_config
from common.optim import decay_groups
from gpt2.config import Shape
from gpt2.model import GPT2, flops_per_token, parameter_count

TINY = Shape(layers=2, heads=4, width=32, vocabulary=61, context=16)


@pytest.fixture
def transformers(monkeypatch):
    """Hugging Face's package without torchvision, whose import fails beside a CPU build of torch."""
    import transformers
    from transformers.utils import import_utils

    for module in (import_utils, transformers.utils):
        monkeypatch.setattr(module, "is_torchvision_available", lambda: False)
    return transformers


@pytest.mark.parametrize(("bias", "gelu", "activation"), [(True, "tanh", "gelu_new"), (False, "exact", "gelu")])
def test_logits_loss_and_gradients_are_those_of_hugging_face(bias, gelu, activation, transformers):
    shape = Shape(layers=3, heads=4, width=48, vocabulary=211, context=24, bias=bias, gelu=gelu)
    settings = {"activation_function": activation, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(
        vocab_size=211, n_positions=24, n_embd=48, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0, **settings
    )
    theirs, ours = transformers.GPT2LMHeadModel(config), GPT2(shape)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():  # all away from 0 and 1
            parameter.add_(0.1 * torch.randn_like(parameter))
            if name.endswith("bias") and not bias:
                parameter.zero_()
        copy_weights(ours, theirs, bias)
    tokens = torch.randint(211, (3, 24))
    expected = theirs(tokens, labels=tokens)
    assert (ours(tokens) - expected.logits).abs().max() < 1e-4
    loss = ours(tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
    loss.backward()
    expected.loss.backward()
    assert (ours.tokens.weight.grad - theirs.transformer.wte.weight.grad).abs().max() < 1e-4


def copy_weights(ours, theirs, bias):
    """Hugging Face keeps linear weights as [in, out]."""
    pairs = [(ours.norm, theirs.transformer.ln_f)]
    ours.tokens.weight.copy_(theirs.transformer.wte.weight)
    ours.positions.weight.copy_(theirs.transformer.wpe.weight)
    for mine, other in zip(ours.blocks, theirs.transformer.h, strict=True):
        pairs += [(mine.norm1, other.ln_1), (mine.norm2, other.ln_2)]
        pairs += [(mine.attention.qkv, other.attn.c_attn), (mine.attention.project, other.attn.c_proj)]
        pairs += [(mine.feed_forward.expand, other.mlp.c_fc), (mine.feed_forward.project, other.mlp.c_proj)]
    for mine, other in pairs:
        mine.weight.copy_(other.weight if isinstance(mine, torch.nn.LayerNorm) else other.weight.T)
        if bias:
            mine.bias.copy_(other.bias)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # OpenAI's sizes: 124,439,808, 354,823,168, 774,030,080 and 1,557,611,200 with biases and 50,257 tokens.
        ("gpt2_small", 124_439_808),
        ("gpt2_medium", 354_823_168),
        ("gpt2_large", 774_030_080),
        ("gpt2_xl", 1_557_611_200),
    ],
)
def test_sizes_are_those_of_openais_models(name, parameters):
    shape = compose_config("gpt2", [f"model={name}", "model.bias=true", "model.vocabulary=50257"]).model
    assert parameter_count(shape) == parameters


def test_flops_are_those_that_torch_counts():
    model, tokens = GPT2(TINY), torch.zeros(1, TINY.context + 1, dtype=torch.int64)
    backend = torch.nn.attention.SDPBackend.MATH
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(backend):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)  # of which 6 N credits what is no product
    assert counter.get_total_flops() == TINY.context * (flops_per_token(TINY) - 6 * norms)


def test_start_is_near_the_uniform_distribution_with_smaller_residual_branches():
    torch.manual_seed(0)
    shape = Shape(layers=8, heads=4, width=128, vocabulary=512, context=32, bias=True)
    model, tokens = GPT2(shape), torch.randint(512, (8, 33))
    assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(math.log(512), abs=0.1)
    block = model.blocks[3]
    for module in (block.attention.qkv, block.feed_forward.expand, model.tokens, model.positions):
        assert module.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for module in (block.attention.project, block.feed_forward.project):
        assert module.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
        assert not module.bias.any()


def test_the_output_layer_is_the_embedding_and_matrices_alone_decay():
    model = GPT2(Shape(layers=1, heads=2, width=16, vocabulary=32, context=8, bias=True))
    assert sum(p.shape == (32, 16) for p in model.parameters()) == 1
    decay, rest = decay_groups(model, 0.1)
    assert {p.dim() for p in decay["params"]} == {2}
    assert {p.dim() for p in rest["params"]} == {1}


def test_dropout_is_drawn_in_training_only():
    model = GPT2(Shape(layers=1, heads=2, width=16, vocabulary=32, context=8, dropout=0.5))
    tokens = torch.arange(8)[None]
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_too_long_a_sequence_is_an_error():
    with pytest.raises(ValueError, match="17 tokens, expected at most context=16"):
        GPT2(TINY)(torch.zeros(1, 17, dtype=torch.int64))
