"""What no rebuilding may change: configurations, and parameters, metrics and checkpoints of short runs.

python -m tests.golden.record                   writes tests/golden/golden.json
python -m tests.golden.record --against FILE    compares bit for bit with a file that this machine wrote
"""

import argparse
import hashlib
import json
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.config.overrides import flatten
from common.experiments.definitions import ROOT
from common.launch.compose import compose_config
from common.launch.processes import launch

FILE = Path(__file__).with_name("golden.json")
EXPERIMENTS = ROOT / "configs" / "experiment"
TASK_OF = {  # of the experiments' first names
    "gpt2": "gpt2",
    "gpt2_fair": "gpt2",
    "gpt2_horizon": "gpt2",
    "figure6": "transformer",
    "table2": "transformer",
    "table2_fair": "transformer",
    "table2_text": "transformer",
    "transformer": "transformer",
}

SHORT = ["workers=simulated", "workers.count=4", "workers.per_host=2", "training.steps=20", "schedule.warmup=2"]
SHORT += ["evaluation.every=10", "logging.every=5", "training.checkpoint_every=20", "logging.progress=false"]
CNN = ["model.width=4"]
GPT2 = ["experiment=gpt2/proxy", "model.layers=2", "model.width=32", "model.heads=2", "data.evaluation_batches=1"]
TRANSFORMER = ["experiment=transformer/proxy", "model.width=32", "model.hidden=64", "model.heads=2"]
TRANSFORMER += ["data.train_lines=2000", "data.held_out_lines=50", "training.batch_size=1024"]
TRANSFORMER += ["decoding.in_training=false", "evaluation.models_kept=1"]
PROCESSES = ["workers=processes", "workers.count=2", "workers.per_host=1"]
SGD = ["optimizer=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.05"]
CASES: dict[str, tuple[str, list[str]]] = {
    "cnn allreduce adamw": ("cnn", [*CNN, "parallel=allreduce", "optimizer=adamw", "training.clip=1.0"]),
    "cnn accumadam aer": ("cnn", [*CNN, "topology=aer", "optimizer=accumadam", "optimizer.accumulation_steps=4"]),
    "cnn accumadamw staggered": (
        "cnn",
        [*CNN, "topology=aer", "optimizer=accumadamw", "parallel.phases=staggered", "parallel.bucket_mb=0.01"],
    ),
    "cnn dmsgd one_peer_exponential": (
        "cnn",
        [*CNN, "topology=one_peer_exponential", "optimizer=dmsgd", "optimizer.lr=0.05", "parallel.order=atc"],
    ),
    "cnn qg_dmsgd static_exponential": (
        "cnn",
        [*CNN, "topology=static_exponential", "optimizer=qg_dmsgd", "optimizer.lr=0.05", "parallel.order=atc"],
    ),
    "gpt2 muon random_matching": ("gpt2", [*GPT2, "topology=random_matching", "optimizer=muon"]),
    "cnn diloco": ("cnn", [*CNN, "parallel=diloco", "parallel.local_steps=5", "optimizer=adamw"]),
    "cnn gossip_diloco": (
        "cnn",
        [*CNN, "parallel=gossip_diloco", "parallel.local_steps=6", "topology=one_peer_ring", "optimizer=adamw"],
    ),
    "cnn streaming_diloco": ("cnn", [*CNN, "parallel=streaming_diloco", "parallel.local_steps=6", "optimizer=adamw"]),
    "cnn noloco": ("cnn", [*CNN, "parallel=noloco", "parallel.local_steps=5", "optimizer=adamw"]),
    "cnn sgp star": ("cnn", [*CNN, "parallel=sgp", "topology=one_peer_exponential", *SGD]),
    "cnn dsgd_ac": ("cnn", [*CNN, "parallel=dsgd_ac", "topology=ring", *SGD, "parallel.mixing.start=5"]),
    "cnn dirichlet batched": (
        "cnn",
        [*CNN, "data.partition=dirichlet", "data.alpha=0.1", "model.norm=group", "workers.batched=true", *SGD],
    ),
    "cnn fp16 accumulated": (
        "cnn",
        [*CNN, "training.precision=fp16", "training.gradient_accumulation=2", "optimizer=accumadamw"],
    ),
    "cnn elastic script": (
        "cnn",
        [*CNN, "topology=ring", "optimizer=adam", "elastic.script=[{step: 6, leave: [2]}, {step: 12, join: [2]}]"],
    ),
    "cnn processes": ("cnn", [*CNN, "topology=complete", "optimizer=accumadam", *PROCESSES]),
    "gpt2 accumadamw aer": ("gpt2", [*GPT2, "topology=aer", "optimizer.accumulation_steps=4"]),
    "gpt2 half-lives": (
        "gpt2",
        [
            *GPT2,
            "topology=complete",
            "optimizer.betas=null",
            "optimizer.half_life.first=20000",
            "optimizer.half_life.second=60000",
            "optimizer.decay=independent",
            "optimizer.weight_decay=0.0001",
        ],
    ),
    "gpt2 shared second moments": (
        "gpt2",
        [*GPT2, "topology=complete", "parallel.share_second_moment=mean", "optimizer.accumulation_steps=1"],
    ),
    "transformer accumadam aer": (
        "transformer",
        [*TRANSFORMER, "parallel=decentralized", "topology=aer", "optimizer=accumadam"],
    ),
}


def digest(value: Any) -> str:
    """Return a short hash of nested dictionaries and lists of tensors and plain values."""
    total = hashlib.sha256()
    for path, item in leaves(value):
        if "/recorder/" in path or path.endswith("_s"):  # seconds
            continue
        total.update(path.encode())
        if isinstance(item, Tensor):
            item = item.detach().contiguous()
            total.update(f"{item.dtype}{tuple(item.shape)}".encode())
            total.update(item.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(repr(item).encode())
    return total.hexdigest()[:16]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of everything that is no dictionary, list or tuple, in order."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from leaves(item, f"{path}/{number}")
    else:
        yield path, value


def layout(value: Any) -> str:
    """Return a short hash of a checkpoint's keys, shapes and types."""
    shapes = [
        f"{path} {item.dtype} {tuple(item.shape)}" if isinstance(item, Tensor) else f"{path} {type(item).__name__}"
        for path, item in leaves(value)
    ]
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]


def experiments() -> dict[str, str]:
    """Return a hash of the configuration of each experiment file."""
    found = {}
    for file in sorted(EXPERIMENTS.rglob("*.yaml")):
        name = file.relative_to(EXPERIMENTS).with_suffix("").as_posix()
        if file.stem == "base":
            continue  # a part of others
        config = compose_config(TASK_OF.get(name.split("/")[0], "cnn"), [f"experiment={name}"])
        text = json.dumps(flatten(config.model_dump(mode="json")), sort_keys=True)
        found[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def run(name: str, folder: Path) -> dict[str, Any]:
    """Train a case; return its last metrics, and hashes of all metrics, of the checkpoint and of its layout."""
    task, overrides = CASES[name]
    own = [f"data.path={folder.parent}/data"] if task == "transformer" else []  # its size is not that of the default
    if code := launch(task, [*SHORT, *overrides, *own, f"run_dir={folder}"]):
        raise RuntimeError(f"{name}: ended with exit code {code}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: value for key, value in row.items() if not key.startswith("time_")} for row in lines]
    files = sorted((folder / "checkpoints").rglob("*.pt"))
    saved = {str(file.relative_to(folder)): torch.load(file, weights_only=True) for file in files}
    return {
        "train_loss": [row["loss"] for row in rows if row["split"] == "train"][-1],
        "validation_loss": [row["loss"] for row in rows if row["split"] == "validation"][-1],
        "metrics": hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16],
        "layout": layout(saved),
        "checkpoints": digest(saved),
    }


def machine() -> str:
    """Return what the last bits of a run depend on; MKL and oneDNN choose their code by the kind of CPU."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    known = dict(line.split("\t: ", 1) for line in lines if "\t: " in line)
    cpu = [known.get(key, "unknown") for key in ("vendor_id", "cpu family", "model\t", "stepping")]
    return f"torch {torch.__version__}, {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {' '.join(cpu)}"


def record() -> dict[str, Any]:
    """Return everything, training all cases with one thread."""
    torch.set_num_threads(1)
    runs = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            runs[name] = run(name, Path(folder) / "run")
    return {"machine": machine(), "experiments": experiments(), "runs": runs}


def differences(found: Any, expected: Any) -> list[str]:
    """Return a line for each value that differs."""
    now, before = dict(leaves(found)), dict(leaves(expected))
    return [
        f"{path[1:]}: {before.get(path)} became {now.get(path)}"
        for path in now | before
        if now.get(path) != before.get(path)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path)
    against = parser.parse_args().against
    found = record()
    if against is None:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        return
    different = differences(found, json.loads(against.read_text()))
    print("\n".join(different) or "no difference")
    raise SystemExit(bool(different))


if __name__ == "__main__":
    main()
