"""Parameters as views of one vector, cut into equal buckets."""

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from common.flat import ALIGNMENT_BYTES, cut, flatten, layout


def model() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.Linear(3, 5), nn.Linear(5, 5))
    module[2].bfloat16()
    module[1].bias.requires_grad_(False)
    return module


def test_values_strides_and_identity_survive() -> None:
    module = model()
    before = {name: (p, p.detach().clone(), p.stride()) for name, p in module.named_parameters()}
    flatten(module)
    for name, parameter in module.named_parameters():
        same, value, stride = before[name]
        assert parameter is same
        assert torch.equal(parameter, value)
        assert parameter.stride() == stride


def test_scripted_modules_are_laid_out_too() -> None:
    module = torch.jit.script(model())
    flatten(module)[0].check("somewhere")


def test_one_vector_for_each_dtype_and_frozen_parameters_stay_outside() -> None:
    module = model()
    place = module[1].bias.data_ptr()
    vectors = flatten(module)
    assert [vector.data.dtype for vector in vectors] == [torch.float32, torch.bfloat16]
    assert [[slot.name for slot in vector.slots] for vector in vectors] == [
        ["0.weight", "0.bias", "1.weight"],
        ["2.weight", "2.bias"],
    ]
    assert module[1].bias.data_ptr() == place


def test_parameters_are_aligned_views_and_padding_is_zero() -> None:
    module = model()
    for vector in flatten(module):
        assert vector.data.data_ptr() % ALIGNMENT_BYTES == 0
        assert all(parameter.data_ptr() % ALIGNMENT_BYTES == 0 for parameter in vector.parameters)
        total = sum(parameter.detach().double().sum() for parameter in vector.parameters)
        assert vector.data.double().sum().item() == pytest.approx(total.item())
        vector.data.fill_(3)
        assert all((parameter == 3).all() for parameter in vector.parameters)


def test_move_to_another_place_keeps_values() -> None:
    module = model()
    expected = [parameter.detach().clone() for parameter in module.parameters()]
    for vector in flatten(module):
        matrix = torch.zeros(2, vector.numel + 3, dtype=vector.data.dtype)
        vector.move_to(matrix[1, : vector.numel])
        assert vector.parameters[0].untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), expected, strict=True))


def test_tied_parameters_are_laid_out_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    (vector,) = flatten(module)
    assert [slot.name for slot in vector.slots] == ["0.weight", "0.bias", "1.bias"]
    assert module[1].weight is module[0].weight


@pytest.mark.parametrize("make", [nn.Parameter, lambda t: nn.Parameter(t, requires_grad=False), nn.Buffer])
def test_different_parameters_that_overlap_are_refused(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module = nn.Module()
    storage = torch.randn(20)
    module.trained, module.frozen = nn.Parameter(storage[:12]), make(storage[10:])
    with pytest.raises(ValueError, match="'trained' and 'frozen' are different Parameters or buffers that share"):
        flatten(module)
    module.whole, module.trained = nn.Buffer(storage), nn.Parameter(storage[12:])  # `frozen` ends between these
    with pytest.raises(ValueError, match="are different Parameters or buffers that share memory"):
        flatten(module)
    del module.whole
    module.trained, module.frozen = nn.Parameter(storage[:12:4]), make(storage[8:9])
    with pytest.raises(ValueError, match="are different Parameters or buffers that share memory"):
        flatten(module)
    module.trained = nn.Parameter(storage[12:])
    module.frozen = make(storage[:12])  # neighbours in one storage (as in an LSTM on a GPU) are fine
    module.sparse = nn.Buffer(torch.eye(2).to_sparse())
    assert len(flatten(module)) == 1


def test_no_trainable_parameter_gives_no_vector() -> None:
    assert flatten(nn.Linear(2, 2).requires_grad_(False)) == []


def test_layout_has_no_holes_but_alignment() -> None:
    slots, length = layout(
        [("a", torch.zeros(3)), ("b", torch.zeros(0)), ("c", torch.zeros(5, 4)), ("d", torch.zeros(()))]
    )
    assert [(slot.name, slot.offset, slot.numel) for slot in slots] == [
        ("a", 0, 3),
        ("b", 16, 0),
        ("c", 16, 20),
        ("d", 48, 1),
    ]
    assert length == 49


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 1000, 4096, 100_003])
@pytest.mark.parametrize("bucket_bytes", [64, 100, 4096, 10**9])
@pytest.mark.parametrize("element_size", [2, 4, 8])
def test_cut_covers_everything_in_equal_aligned_pieces(numel: int, bucket_bytes: float, element_size: int) -> None:
    spans = cut(numel, element_size, bucket_bytes)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == numel
    sizes = [span.stop - span.start for span in spans]
    assert len(set(sizes[:-1])) <= 1
    assert 0 < sizes[-1] <= sizes[0]
    assert all(span.start * element_size % ALIGNMENT_BYTES == 0 for span in spans)
    assert sizes[0] * element_size < bucket_bytes + ALIGNMENT_BYTES
    assert len(spans) <= math.ceil(numel * element_size / bucket_bytes)


def test_a_write_is_noticed_only_while_protected() -> None:
    linear = nn.Linear(3, 3)
    (vector,) = flatten(linear)

    def write() -> None:
        with torch.no_grad():
            linear.bias.add_(1)

    write()
    vector.check("here")
    vector.protect()
    vector.check("here")
    vector.data.add_(1)  # the engine's own writes go through the vector
    vector.check("here")
    write()
    with pytest.raises(RuntimeError, match="here: parameter 'bias' was written while its message was in flight"):
        vector.check("here")
    vector.release()
    vector.check("here")


def test_a_moved_parameter_is_noticed() -> None:
    linear = nn.Linear(3, 3)
    (vector,) = flatten(linear)
    linear.weight.data = linear.weight.data.clone()
    with pytest.raises(RuntimeError, match=r"here: parameter 'weight' is no longer a view.*before wrapping it"):
        vector.check("here")


def test_parameters_are_reordered_in_the_same_memory() -> None:
    """Values, shapes and the length of the vector stay; the last parameter stays the last one."""
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 2))
    expected = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    (vector,) = flatten(module)
    address, numel = vector.data.data_ptr(), vector.numel
    vector.group_by(lambda parameter: parameter.dim())
    assert [slot.name for slot in vector.slots] == ["0.weight", "1.weight", "2.weight", "0.bias", "1.bias", "2.bias"]
    last = vector.slots[-1]
    assert (vector.data.data_ptr(), last.offset + last.numel, vector.numel) == (address, numel, numel)
    vector.check("after reordering")
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, expected[name])


def test_a_replaced_parameter_is_noticed() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight  # tied
    (vector,) = flatten(module)
    vector.check("here")
    module[1].weight = nn.Parameter(module[0].weight.detach())  # the same memory, another object
    with pytest.raises(RuntimeError, match=r"here: parameter '0.weight' is no longer a view of the flat vector"):
        vector.check("here")


@pytest.mark.parametrize("checked", [False, True])
def test_a_write_through_data_is_found_where_values_are_compared(
    checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if checked:
        monkeypatch.setenv("GOSSIP_CHECK_WRITES", "1")
    module = model()
    module[2].weight.data[0, 0] = math.nan  # equals itself here
    vectors = flatten(module)
    for vector in vectors:
        vector.protect()
        vector.check("somewhere")
    module[2].bias.data.clamp_(-1e-3, 1e-3)
    with pytest.raises(RuntimeError, match=r"parameter '2\.bias' was written") if checked else contextlib.nullcontext():
        vectors[1].check("somewhere")
    vectors[1].release()
    vectors[1].check("somewhere")
