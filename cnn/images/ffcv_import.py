"""Importing FFCV, which is optional."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

WHAT_TO_DO = (
    "`make env` installs it where it finds a C++ compiler, OpenCV and libjpeg-turbo (Debian: build-essential "
    "pkg-config libopencv-dev libturbojpeg0-dev); data.loader=torchvision reads folders of images without it"
)


def import_ffcv() -> None:
    """Import FFCV, which takes seconds. Raises ImportError saying how to install it."""
    with torch_threads_kept():
        try:
            importlib.import_module("ffcv")
        except ImportError as error:
            raise ImportError(f"FFCV cannot be imported ({error}). {WHAT_TO_DO}") from error


@contextmanager
def torch_threads_kept() -> Iterator[None]:
    """Restore PyTorch's number of threads after the block; FFCV sets it to its own."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
