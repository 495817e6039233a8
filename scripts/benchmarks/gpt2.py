"""Measures what training GPT-2 with our loop costs: one worker against a loop written by hand.

python -m scripts.benchmarks.gpt2 [model=gpt2_proxy] [batch_size=8] [steps=60] [rounds=5] [threads=1]

Both train the same model on the same tokens with torch.optim.AdamW on the CPU and take turns step by step, so that
what slows the machine down slows both alike. The bare loop cuts random windows out of the memory map, runs forward and
backward, clips, steps the optimizer and the schedule; ours also wraps the model, checks tokens, keeps records and
random states, and can be interrupted and resumed. What the tokens are does not change a step's time: they are random.
"""

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from pydantic import Field, PositiveInt
from torch.nn.utils import clip_grad_norm_

from common.cli import Arguments, Text, command_of, main_function, parse
from common.optim import cosine_with_warmup
from common.report.benchmark import Benchmark
from common.training.compose import compose_config
from gpt2.config import Gpt2Config
from gpt2.model import GPT2, parameter_count
from gpt2.token_files import DTYPE, FORMAT, HEADER, SPLITS, Header
from scripts.benchmarks.turns import UNTIMED, run_by_turns

MODULE = "scripts.benchmarks.gpt2"
LEAST = 0.98  # of the bare loop's tokens per second
TOKENS = 1_000_000
LOOPS = {"decentralized": ["parallel=decentralized"], "allreduce": ["parallel=allreduce"]}
COLUMNS = {
    "loop": "ours with that `parallel`, one worker",
    "tokens_per_s": "tokens of a step / its duration: median over the steps of a round, then over the rounds",
    "bare_tokens_per_s": "the same for the bare loop beside it",
    "ratio_to_bare": "tokens_per_s over the bare loop's in the step beside it: median over the steps, then the rounds",
    "spread": "interquartile range of ratio_to_bare over the rounds",
}
FORMATS = {"tokens_per_s": ",.0f", "bare_tokens_per_s": ",.0f", "ratio_to_bare": ".4f", "spread": ".4f"}


class BenchArguments(Arguments):
    """Command line of scripts.benchmarks.gpt2."""

    model: Text = Field("gpt2_proxy", description="a file in configs/model")
    batch_size: PositiveInt = Field(8, description="sequences in a step")
    steps: PositiveInt = Field(60, ge=2 * UNTIMED, description="of a round")
    rounds: PositiveInt = Field(5, ge=2, description="runs of each loop")
    threads: PositiveInt = Field(1, description="CPU threads")
    output: Text = Field("results/benchmarks", description="where gpt2.csv and gpt2.md are written")


@main_function
def main(argv: Sequence[str]) -> int:
    """Times the loops, writes the table."""
    arguments = parse(BenchArguments, argv, MODULE, "Times the training of GPT-2.")
    benchmark = Benchmark("gpt2", "Training GPT-2", COLUMNS, FORMATS)
    rounds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in LOOPS}
    with tempfile.TemporaryDirectory() as folder:
        common = overrides(arguments, Path(folder))
        config = compose_config("gpt2", common)  # here, not in train_bare's thread: Hydra stands one at a time
        write_random_tokens(Path(config.data.folder), config.model.vocabulary)
        for number in range(arguments.rounds):
            for name, results in rounds.items():
                run = f"run_dir={folder}/{name}_{number}"
                turns = run_by_turns("gpt2", [*common, *LOOPS[name], run], lambda turn: train_bare(config, turn))
                results.append(turns.compare())
    tokens = arguments.batch_size * config.model.context
    rows = [row(name, results, tokens) for name, results in rounds.items()]
    used = f"{arguments.threads} used"
    benchmark.write(rows, conclude(rows, arguments, config), arguments.output, command_of(MODULE, arguments), used)
    return 0


def row(name: str, results: Sequence[tuple[float, float, float]], tokens: int) -> dict[str, object]:
    """One loop's line of the table; results: (seconds of our step, of a bare one, their ratio) of each round."""
    ours, bare, ratios = zip(*results, strict=True)
    low, median, high = statistics.quantiles([1 / ratio for ratio in ratios], n=4)
    return {
        "loop": name,
        "tokens_per_s": tokens / statistics.median(ours),
        "bare_tokens_per_s": tokens / statistics.median(bare),
        "ratio_to_bare": median,
        "spread": high - low,
    }


def overrides(arguments: BenchArguments, folder: Path) -> list[str]:
    """The configuration of both loops."""
    return [
        f"model={arguments.model}",
        "data=tokens",
        f"data.folder={folder}/tokens",
        "data.evaluation_batches=1",
        "optimizer=adamw",
        "optimizer.weight_decay=0.1",
        "schedule.warmup=5",
        f"training.batch_size={arguments.batch_size}",
        f"training.steps={arguments.steps}",
        f"training.threads={arguments.threads}",
        "training.device=cpu",
        "training.clip=1.0",
        "training.checkpoint_every=null",
        "evaluation.every=1000000",
        "evaluation.batch_size=1",
        "logging.progress=false",
    ]


def write_random_tokens(folder: Path, vocabulary: int) -> None:
    """A folder as gpt2.prepare leaves it."""
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


def train_bare(config: Gpt2Config, boundary: Callable[[], None]) -> None:
    """A loop written by hand."""
    torch.set_num_threads(config.training.threads)
    data = np.memmap(Path(config.data.folder) / "train.bin", dtype=np.uint16, mode="r")
    context, batch_size = config.model.context, config.training.batch_size
    model = GPT2(config.model.shape)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.optimizer.betas)
    schedule = cosine_with_warmup(optimizer, config.training.steps, warmup_steps=5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(config.training.steps):
        boundary()
        starts = torch.randint(len(data) - context, (batch_size,), generator=generator).tolist()
        inputs = torch.stack([torch.from_numpy(data[i : i + context].astype(np.int64)) for i in starts])
        targets = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + context].astype(np.int64)) for i in starts])
        model(inputs, targets).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()


def conclude(rows: Sequence[dict[str, object]], arguments: BenchArguments, config: Gpt2Config) -> list[str]:
    """What was measured and what it says."""
    worst = min(row["ratio_to_bare"] for row in rows)
    shape = config.model.shape
    return [
        f"{arguments.model}, {parameter_count(shape) / 1e6:.1f} M parameters, context {shape.context}, batch of "
        f"{arguments.batch_size}, fp32, {arguments.rounds} rounds of {arguments.steps} steps.",
        f"Our loop trains {100 * worst:.1f} % of the bare loop's tokens per second at worst: this "
        f"{'meets' if worst >= LEAST else 'misses'} the aim of at least {100 * LEAST:.0f} %.",
    ]


if __name__ == "__main__":
    sys.exit(main())
