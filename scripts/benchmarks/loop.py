"""Measure what the training loop costs: ours around one worker against a loop written by hand.

python -m scripts.benchmarks.loop [task=cnn] [batches=64,256] [steps=100] [rounds=7] [threads=1]       loop.{csv,md}
python -m scripts.benchmarks.loop task=gpt2 [batches=8] [overrides=model=gpt2_small] ...               gpt2.{csv,md}

Both train the same model on the same kind of data in this process, on the CPU, and take turns step by step. The bare
loop draws a batch, runs forward and backward, clips (gpt2), steps the optimizer and the schedule; ours also wraps the
model, checks what it reads, keeps records and random states, and can be interrupted and resumed. cnn: digits, Adam.
gpt2: AdamW and random tokens, as their values do not change a step's time.
"""

import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from cnn.config import CnnConfig
from cnn.data import open_data
from cnn.model import SmallResNet
from common.cli import ONE_OR_SEVERAL, Arguments, Text, command_of, main_function, parse
from common.optim import constant_with_warmup, cosine_with_warmup
from common.report.benchmark import Benchmark
from common.training.compose import compose_config
from common.training.config import Config
from gpt2.config import Gpt2Config
from gpt2.model import GPT2
from gpt2.token_files import DTYPE, FORMAT, HEADER, SPLITS, Header
from scripts.benchmarks.interleaved_steps import UNTIMED, run_interleaved
from scripts.benchmarks.rounds import median_and_spread

MODULE = "scripts.benchmarks.loop"
TOKENS = 1_000_000
LOOPS = {"decentralized": ["parallel=decentralized"], "allreduce": ["parallel=allreduce"]}
COLUMNS = {
    "batch_size": "images or sequences in a step",
    "loop": "ours with that `parallel`, one worker",
    "step_ms": "median over the steps of a round, then over the rounds",
    "bare_step_ms": "the same for the bare loop beside it",
    "ratio_to_bare": "of a step to the bare loop's step beside it: median over the steps, then over the rounds",
    "spread": "interquartile range of ratio_to_bare over the rounds",
}
FORMATS = {"ratio_to_bare": ".4f", "spread": ".4f"}
# Nothing but steps: no evaluation, no checkpoint, no progress bar.
STEPS_ONLY = ["evaluation.every=1000000", "training.checkpoint_every=null", "logging.progress=false"]


class BenchArguments(Arguments):
    """Command line of scripts.benchmarks.loop."""

    task: Literal["cnn", "gpt2"] = Field("cnn", description="what is trained: cnn or gpt2")
    batches: Text | None = Field(
        None, pattern=r"^\d+(,\d+)*$", description="images or sequences in a step; null: 64,256 or 8"
    )
    overrides: Annotated[tuple[Text, ...], ONE_OR_SEVERAL] = Field(
        (), description="of the task's configuration, for both loops, such as model.width=16"
    )
    steps: PositiveInt = Field(100, ge=2 * UNTIMED, description="of a round")
    rounds: PositiveInt = Field(7, ge=2, description="runs of each loop")
    threads: PositiveInt = Field(1, description="CPU threads")
    output: Text = Field("results/benchmarks", description="where the table is written, as .csv and .md")


class BareLoop(NamedTuple):
    """What a loop written by hand trains; losses: the next batch's loss, without end."""

    model: nn.Module
    losses: Iterator[Tensor]
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    clip: float | None = None


@dataclass(frozen=True)
class Subject:
    """A task as it is timed.

    batches:    sizes if none are given
    overrides:  configuration of both loops, {folder} being a temporary folder
    bare:       the loop written by hand; it makes the data that the configuration names if they are missing
    """

    table: str
    title: str
    batches: str
    overrides: Sequence[str]
    bare: Callable[[Config], BareLoop]


@main_function
def main(argv: Sequence[str]) -> int:
    """Time the loops, write the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Time the training loop.")
    subject = SUBJECTS[arguments.task]
    benchmark = Benchmark(subject.table, subject.title, COLUMNS, FORMATS)
    batches = [int(batch) for batch in (arguments.batches or subject.batches).split(",")]
    rounds: dict[tuple[int, str], list[tuple[float, float, float]]] = {
        (batch, name): [] for batch in batches for name in LOOPS
    }
    with tempfile.TemporaryDirectory() as folder:
        common = [override.format(folder=folder) for override in subject.overrides] + STEPS_ONLY
        common += [f"training.steps={arguments.steps}", f"training.threads={arguments.threads}", *arguments.overrides]
        for number in range(arguments.rounds):
            for (batch, name), results in rounds.items():
                both = [*common, f"training.batch_size={batch}"]
                ours = [*both, *LOOPS[name], f"run_dir={folder}/{name}_{batch}_{number}"]
                config = compose_config(arguments.task, both)  # not in the other thread: Hydra composes one at a time
                bare = subject.bare(config)
                results.append(run_interleaved(arguments.task, ours, partial(train_bare, bare, config)).compare())
    parameters = sum(p.numel() for p in bare.model.parameters())
    rows = [row(batch, name, results) for (batch, name), results in rounds.items()]
    used = f"{arguments.threads} used"
    said = conclude(rows, arguments, parameters)
    benchmark.write(rows, said, arguments.output, command_of(MODULE, arguments), used)
    return 0


def train_bare(bare: BareLoop, config: Config, boundary: Callable[[], None]) -> None:
    """Train as one would by hand, with a call of `boundary` before each step."""
    torch.set_num_threads(config.training.threads)
    for _ in range(config.training.steps):
        boundary()
        next(bare.losses).backward()
        if bare.clip is not None:
            clip_grad_norm_(bare.model.parameters(), bare.clip)
        bare.optimizer.step()
        bare.optimizer.zero_grad(set_to_none=True)
        bare.schedule.step()


def row(batch: int, name: str, results: Sequence[tuple[float, float, float]]) -> dict[str, object]:
    """Return one line of the table; results: (seconds of our step, of a bare one, their ratio) of each round."""
    ours, bare, ratios = zip(*results, strict=True)
    ratio, spread = median_and_spread(ratios)
    return {
        "batch_size": batch,
        "loop": name,
        "step_ms": 1000 * statistics.median(ours),
        "bare_step_ms": 1000 * statistics.median(bare),
        "ratio_to_bare": ratio,
        "spread": spread,
    }


def conclude(rows: Sequence[dict[str, object]], arguments: BenchArguments, parameters: int) -> list[str]:
    """Return what was measured and what the table says."""
    sentences = []
    for batch in dict.fromkeys(row["batch_size"] for row in rows):
        of_batch = [row for row in rows if row["batch_size"] == batch]
        ratios = " and ".join(f"{row['ratio_to_bare']:.4f} ({row['loop']})" for row in of_batch)
        step_ms = of_batch[0]["bare_step_ms"]
        sentences.append(f"With a batch of {batch} ({step_ms:.0f} ms a step) ours takes {ratios} times as long.")
    return [
        f"{arguments.task}, {parameters / 1e6:.2f} M parameters, fp32, {arguments.rounds} rounds of "
        f"{arguments.steps} steps.",
        " ".join(sentences),
    ]


def bare_digits(config: CnnConfig) -> BareLoop:
    """Return the small ResNet's loop."""
    data = open_data(config)
    batches = data.train(0, 1, config.training.batch_size, torch.device("cpu"))
    model = SmallResNet(data.channels, data.classes, config.model.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    drawn = itertools.chain.from_iterable(map(batches.epoch, itertools.count()))
    losses = (F.cross_entropy(model(images), labels) for images, labels in drawn)
    return BareLoop(model, losses, optimizer, constant_with_warmup(optimizer))


def write_random_tokens(folder: Path, vocabulary: int) -> None:
    """Write a folder as gpt2.prepare leaves it, unless it exists."""
    if folder.exists():
        return
    folder.mkdir()
    random = np.random.default_rng(0)
    for split in SPLITS:
        (folder / f"{split}.bin").write_bytes(random.integers(vocabulary, size=TOKENS).astype(DTYPE).tobytes())
    header = Header(
        format=FORMAT,
        encoding="bytes",
        vocabulary_size=vocabulary,
        end_of_text=vocabulary - 1,
        largest_token=vocabulary - 1,
        tokens=dict.fromkeys(SPLITS, TOKENS),
        documents=dict.fromkeys(SPLITS, 1),
        unigram_entropy=float(np.log(vocabulary)),
        source="random",
        split={"fraction": 0.5, "seed": 0},
        inputs={"files": 0, "bytes": 0, "sha256": ""},
    )
    (folder / HEADER).write_text(header.to_json())


def bare_gpt2(config: Gpt2Config) -> BareLoop:
    """Return GPT-2's loop, which cuts random windows out of a memory map."""
    folder = Path(config.data.folder)
    write_random_tokens(folder, config.model.vocabulary)
    data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
    context, batch_size = config.model.context, config.training.batch_size
    model = GPT2(config.model.shape)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.optimizer.betas)
    schedule = cosine_with_warmup(optimizer, config.training.steps, warmup_steps=5)
    generator = torch.Generator().manual_seed(0)

    def losses() -> Iterator[Tensor]:
        while True:
            starts = torch.randint(len(data) - context, (batch_size,), generator=generator).tolist()
            inputs = torch.stack([torch.from_numpy(data[i : i + context].astype(np.int64)) for i in starts])
            targets = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + context].astype(np.int64)) for i in starts])
            yield model(inputs, targets)

    return BareLoop(model, losses(), optimizer, schedule, clip=1.0)


GPT2_OVERRIDES = [
    "data=tokens",
    "data.folder={folder}/tokens",
    "data.evaluation_batches=1",
    "optimizer=adamw",
    "optimizer.weight_decay=0.1",
    "schedule.warmup=5",
    "training.device=cpu",
    "training.clip=1.0",
    "evaluation.batch_size=1",
]
SUBJECTS = {
    "cnn": Subject("loop", "The training loop", "64,256", ["optimizer=adam", "schedule=constant"], bare_digits),
    "gpt2": Subject("gpt2", "Training GPT-2", "8", GPT2_OVERRIDES, bare_gpt2),
}


if __name__ == "__main__":
    sys.exit(main())
