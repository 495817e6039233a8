"""How long the threads of this process waited for a core, as /proc tells."""

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from common.record import cpu_wait
from common.record.cpu_wait import cpu_wait_s


def test_threads_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for thread, content in {"1": "5000 2000000000 7", "2": "1 500000000 2", "3": ""}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(content)
    monkeypatch.setattr(cpu_wait, "TASKS", tmp_path)
    assert cpu_wait_s() == 2.5
    monkeypatch.setattr(cpu_wait, "TASKS", tmp_path / "elsewhere")
    assert cpu_wait_s() == 0


@pytest.mark.skipif(not cpu_wait.TASKS.exists(), reason="only Linux tells")
def test_who_shares_a_core_waits() -> None:
    """Two threads that compute for 0.2 s on one core wait for each other; hashing lets go of Python's lock."""
    everywhere, before = os.sched_getaffinity(0), cpu_wait_s()
    os.sched_setaffinity(0, {min(everywhere)})
    try:
        end = time.monotonic() + 0.2

        def compute() -> None:
            while time.monotonic() < end:
                hashlib.sha256(bytes(1 << 20)).digest()

        other = threading.Thread(target=compute)
        other.start()
        compute()
        waited = cpu_wait_s() - before  # before the other one ends, and is no longer counted
        other.join()
    finally:
        os.sched_setaffinity(0, everywhere)
    assert waited > 0.01
