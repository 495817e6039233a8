"""Nobody reads a message before it has arrived, or writes parameters that are still being sent.

Messages are late copies on their own stream, see `groups.py`. As all workers are equal there, training with messages
must give what training without them gives. On a GPU torch's sanitizer also watches every access of an operation to a
tensor; it sees no compiled kernels, so these run operation by operation.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.cuda.device import idle_streams
from tests.gpu.device import Device, on_gpu, on_slow_cpu_too
from tests.gpu.groups import delayed_group
from tests.gpu.training import SmallTraining
from tests.naming import case

CHECK = 4, "messages and updates do not race"
STEPS, WORKERS, TOLERANCE = 12, 4, 1e-4
GOSSIP: tuple[dict[str, object], ...] = (
    {"topology": "one_peer_exponential"},
    {"topology": "ring"},
    {"topology": "static_exponential"},
    {"topology": "complete"},
    {"topology": "one_peer_exponential", "order": "atc"},
    # Two hosts of two. On CPUs, where hosts send shards by messages, an echo's shard is another one than it should be.
    {"topology": "aer", "workers_per_host": 2},
    {"topology": "complete", "workers_per_host": 2},
)


@pytest.fixture
def queued(device: Device, request: pytest.FixtureRequest) -> Iterator[None]:
    """On a CPU, take the engine's path for GPUs."""
    if device.on_gpu:
        yield
        return
    request.getfixturevalue("eager_kernel")
    with idle_streams():
        yield


@functools.cache
def alone(device: Device, fused: bool) -> Tensor:
    """Return the parameters after a training without messages."""
    return SmallTraining(device, "fp32", fused, STEPS).run(range(STEPS)).end()


def compare(device: Device, gossip: dict[str, object], fused: bool) -> float:
    """Check that late messages change no parameter, and return the largest difference."""
    expected = alone(device, fused)
    with delayed_group(WORKERS), case(gossip, fused):
        got = SmallTraining(device, "fp32", fused, STEPS, gossip).run(range(STEPS)).end()
        difference = (got - expected).abs().max().nan_to_num(torch.inf).item()
        assert difference <= TOLERANCE, f"{gossip}, fused={fused}: late messages change parameters by {difference:.1e}"
    return difference


@pytest.mark.usefixtures("queued")
@on_slow_cpu_too
def test_late_messages_change_nothing(device: Device, figure: Callable[[str], None]) -> None:
    cases = list(itertools.product(GOSSIP, (False, True)))
    largest = max(compare(device, gossip, fused) for gossip, fused in cases)
    figure(f"{len(cases)} trainings with late messages differ from those without by at most {largest:.1e}")


@on_gpu
def test_the_sanitizer_sees_no_race(device: Device, figure: Callable[[str], None]) -> None:
    from torch.cuda._sanitizer import CUDASanitizer, CUDASanitizerErrors

    sanitizer = CUDASanitizer()
    sanitizer.enable()
    try:
        tensor = torch.zeros(8, device="cuda")
        with pytest.raises(CUDASanitizerErrors), torch.cuda.stream(torch.cuda.Stream()):
            tensor.add_(1)
        for gossip, fused in itertools.product(GOSSIP, (False, True)):
            with torch.compiler.set_stance("force_eager"), delayed_group(WORKERS), case(gossip, fused):
                SmallTraining(device, "fp32", fused, STEPS, gossip).run(range(STEPS)).end()
    except CUDASanitizerErrors as errors:
        raise AssertionError(f"{gossip}, fused={fused}: {' '.join(str(errors.errors[0]).split())}") from errors
    finally:
        sanitizer.disable()
    figure("the sanitizer sees no race")
