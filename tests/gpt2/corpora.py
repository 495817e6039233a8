"""Token folders and documents made up by tests."""

from pathlib import Path

import numpy as np

from gpt2.token_files import DTYPE, HEADER, Header

TINY = ["model.layers=1", "model.heads=2", "model.width=16", "model.context=8", "model.vocabulary=32"]


def write_tokens(folder: Path, train: np.ndarray, val: np.ndarray, **changes: object) -> Header:
    """Write a folder as gpt2.prepare does, with `changes` made to its header; return the header."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, tokens in (("train", train), ("val", val)):
        (folder / f"{split}.bin").write_bytes(np.asarray(tokens).astype(DTYPE).tobytes())
    values = {
        "format": 1,
        "encoding": "bytes",
        "vocabulary_size": 32,
        "end_of_text": 31,
        "largest_token": 31,
        "tokens": {"train": len(train), "val": len(val)},
        "documents": {"train": 1, "val": 1},
        "unigram_entropy": 3.0,
        "source": "made up",
        "split": {"fraction": 0.5, "seed": 0},
        "inputs": {"files": 1, "bytes": 1, "sha256": "0" * 64},
    }
    header = Header(**values | changes)
    (folder / HEADER).write_text(header.model_dump_json())
    return header


def pattern(length: int, seed: int = 0) -> np.ndarray:
    """Tokens below 32 that a model can learn to predict: mostly each is the one before plus a fixed step."""
    random = np.random.default_rng(seed)
    steps = np.where(random.random(length) < 0.9, 7, random.integers(0, 32, length))
    return steps.cumsum() % 32
