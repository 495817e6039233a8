"""How tests are shared out among processes (pytest -n 2): file by file, so that fixtures are made once."""

import signal

import pytest

SLURM = "tests/slurm/"  # there is one Slurm on the machine
LONGEST = (SLURM, "tests/training/test_resume.py")  # begin first: at the end one process would be left with them


@pytest.fixture(autouse=True)
def signal_handlers() -> None:
    """Python's own: pytest -n ignores SIGINT, as would all that tests start, and torchrun leaves handlers behind where
    it ran in this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """So are fixtures that are made before a test's own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SLURM if nodeid.startswith(SLURM) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return ByFile(config, log)
