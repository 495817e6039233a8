"""The fast tests pass on this machine with the GPU hidden, and the quickstart learns with the GPU visible."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from tests.gpu.device import Device, on_gpu, program

CHECK = 1, "tests with the GPU hidden, quickstart with it"
LEAST_ACCURACY = 90.0  # percent; the kept runs have 98
ROWS = "rows=allreduce,accumadam_one_peer_exponential"


@on_gpu
def test_the_fast_tests_with_the_gpu_hidden(device: Device, figure: Callable[[str], None]) -> None:
    options = ["-q", "-n", str(min(8, len(os.sched_getaffinity(0)))), "-m", "not slow and not gpu"]
    code, output = program("pytest", *options, limit_s=900, CUDA_VISIBLE_DEVICES="")
    assert code == 0, output[-4000:]
    figure(re.findall(r"(\d+ passed[^\n]*?) in [\d.]+s", output)[-1])


@on_gpu
def test_the_quickstart_learns(device: Device, figure: Callable[[str], None], tmp_path: Path) -> None:
    options = ["table=quickstart", ROWS, "seeds=1", f"runs={tmp_path}"]
    code, output = program("scripts.reproduce", *options, limit_s=300)
    assert code == 0, output[-4000:]
    found = {file.parent.parent.name: json.loads(file.read_text()) for file in tmp_path.rglob("summary.json")}
    accuracies = {name: summary["last"]["validation"]["accuracy"] for name, summary in found.items()}
    figure(f"quickstart: {', '.join(f'{name} {value:.1f} %' for name, value in accuracies.items())}")
    assert len(accuracies) == 2
    assert min(accuracies.values()) >= LEAST_ACCURACY
