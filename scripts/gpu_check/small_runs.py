"""Short runs of the tasks as `python -m <task>.train` makes them, for checks that watch the training loop."""

import traceback
from pathlib import Path

from scripts.benchmarks.loop import STEPS_ONLY, write_random_tokens
from scripts.gpu_check.outcome import Machine

ROOT = str(Path(__file__).resolve().parents[2])
VOCABULARY = 50304
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


def own_line(error: BaseException) -> str:
    """Return an error's message and the innermost line of this project that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(ROOT) and "/.venv/" not in f.filename]
    own = [f for f in own if "/gpu_check/" not in f.filename] or own or list(frames)
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].line})" if own else ""
    return f"{str(error).splitlines()[0]}{where}"
