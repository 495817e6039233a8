"""Short runs of the tasks as `python -m <task>.train` makes them, for checks that watch the training loop."""

import traceback
from pathlib import Path

import numpy as np

from gpt2.token_files import DTYPE, FORMAT, HEADER, SPLITS, Header
from scripts.gpu_check.outcome import Machine

ROOT = str(Path(__file__).resolve().parents[2])
VOCABULARY = 50304
TOKENS = 1_000_000
# Nothing but steps: no evaluation, no checkpoint, no progress bar.
STEPS_ONLY = ["evaluation.every=1000000", "training.checkpoint_every=null", "logging.progress=false"]
GPT2_SIZES = {
    "cuda": ["model=gpt2_small", "training.batch_size=16"],
    "cpu": ["model.layers=2", "model.width=32", "model.heads=2", "model.context=32", "training.batch_size=4"],
}
TASKS = {
    "gpt2": ["data=tokens", "data.evaluation_batches=1", "evaluation.batch_size=1", "training.clip=1.0"],
    "cnn": ["optimizer=accumadam", "schedule=constant"],
}


def steps_only(task: str, machine: Machine, folder: str, steps: int) -> list[str]:
    """Return overrides of a short run of one worker that writes to FOLDER/run and reads random data."""
    arguments = [*STEPS_ONLY, *TASKS[task], f"training.steps={steps}", f"training.device={machine.device}"]
    arguments += [f"run_dir={folder}/run", "workers.count=1", "schedule.warmup=0", "training.threads=1"]
    if task == "gpt2":
        data = Path(folder) / "tokens"
        write_random_tokens(data, VOCABULARY)
        arguments += [f"data.folder={data}", f"model.vocabulary={VOCABULARY}", *GPT2_SIZES[machine.device]]
    return arguments


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


def own_line(error: BaseException) -> str:
    """Return an error's message and the innermost line of this project that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(ROOT) and "/.venv/" not in f.filename]
    own = [f for f in own if "/gpu_check/" not in f.filename] or own or list(frames)
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].line})" if own else ""
    return f"{str(error).splitlines()[0]}{where}"
