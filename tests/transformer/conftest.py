"""Models and data small enough to make in a test."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.launch.processes import launch
from transformer.model import Transformer
from transformer.preparation import folder
from transformer.preparation.pipeline import Recipe

VOCABULARY = 96
NEEDS_FAIRSEQ = "fairseq is not installed: `make env` installs it"
TINY = [
    "model.width=16",
    "model.hidden=32",
    "model.heads=2",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "training.threads=1",
    "logging.progress=false",
]


@pytest.fixture
def compat() -> Any:
    """Return transformer.fairseq_compat; skip the test if fairseq is not installed."""
    return pytest.importorskip("transformer.fairseq_compat", reason=NEEDS_FAIRSEQ, exc_type=ImportError)


@pytest.fixture
def dictionary(compat: Any) -> Any:
    """Return a fairseq dictionary of VOCABULARY tokens."""
    from tests.transformer.fairseq_twin import dictionary_of

    return dictionary_of(VOCABULARY)


@pytest.fixture
def model() -> Transformer:
    """Return a small model whose weights are not near any symmetry."""
    torch.manual_seed(0)
    made = Transformer(VOCABULARY, width=32, hidden=64, heads=4, encoder_layers=2, decoder_layers=3, dropout=0.0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        made.embedding.weight[1] = 0
    return made.eval()


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a data folder of 300 made-up training pairs, 40 for validation, 30 for test."""
    pytest.importorskip("transformer.fairseq_compat", reason=NEEDS_FAIRSEQ, exc_type=ImportError)
    output = tmp_path_factory.mktemp("data") / "small"
    counts = {"train": 300, "valid": 40, "test": 30}
    pairs = {split: iter(list(made_up_pairs(count, split))) for split, count in counts.items()}
    folder.build(output, Recipe("en", "de", merges=40, cleaned=()), {"corpus": "made up"}, pairs, jobs=1)
    return output


def made_up_pairs(count: int, seed: str) -> Iterator[tuple[str, str]]:
    """Lines of 1 to 12 words; the German ones are the English ones backwards, in capitals."""
    import random

    generator = random.Random(seed)
    words = ["apple", "book", "cat", "door", "egg", "fish", "gate", "hill"]
    for _ in range(count):
        line = [generator.choice(words) for _ in range(generator.randint(1, 12))]
        yield " ".join(line) + ".", " ".join(word.capitalize() for word in reversed(line)) + "."


@pytest.fixture(scope="session")
def small(data_folder: Path) -> list[str]:
    """Return the overrides of a run on that folder that takes a second or two."""
    data = ["data=folder", "data.source=en", "data.target=de", f"data.path={data_folder}"]
    return [*data, *TINY, "schedule.warmup=4", "logging.every=3", "training.batch_size=240"]


@pytest.fixture(scope="session")
def run_folder(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of 40 steps that kept the mean models of its last three evaluations of four."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    arguments = ["workers=simulated", "workers.count=2", "training.steps=40", "optimizer.lr=0.01"]
    arguments += ["evaluation.every=10", "evaluation.models_kept=3", f"run_dir={folder}"]
    assert launch("transformer", [*small, *arguments]) == 0
    return folder
