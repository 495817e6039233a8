"""How tests are shared out among the processes of `pytest -n`: file by file, so that fixtures are made once."""

import gc
import signal
from pathlib import Path

import pytest
import torch

from tests.registry import Registry

SLURM = "tests/slurm/"  # in one process, as there is one Slurm on the machine
# Begin first: at the end one process would be left with them.
LONGEST = (
    SLURM,
    "tests/training/test_resume.py",
    "tests/training/test_failures.py",
    "tests/distributed/test_engine_equals_simulator.py",
    "tests/experiments/test_reproduce.py",
    "tests/cuda/test_matcher.py",
)


@pytest.fixture(autouse=True)
def signal_handlers() -> None:
    """Restore Python's own: `pytest -n` ignores SIGINT, as would all programs that tests start, torchrun leaves its
    handlers behind where it ran in this process, and a command that a signal has ended ignores all others."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Compute with one thread, as the processes that a test starts do: sums are then taken in the same order, and tests
    that run side by side do not wait for each other's threads."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the compiled update where a test replaced it, see `tests.distributed.scenarios.Scenario.compiled`."""
    from common.optim import compiled

    monkeypatch.setattr(compiled, "fused_kernel", compiled.fused_kernel)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Return an empty registry of packages."""
    return Registry(tmp_path / "registry", monkeypatch)


@pytest.fixture
def eager_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the fused update as it is written, which takes no time to compile."""
    from common.optim import compiled

    monkeypatch.setattr(compiled, "fused_kernel", compiled.written_kernel)


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Let fixtures of a session or module be interrupted too: they are made before those of a test."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_collection_finish() -> None:
    """Spare each collection of garbage, and whoever lists all objects, what was imported."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SLURM if nodeid.startswith(SLURM) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return ByFile(config, log)
