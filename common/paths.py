"""Paths as users type them: the only place that reads `~`."""

import os


def expand_home(path: str) -> str:
    """Return the path with the home folder for a leading `~` or `~user`, which a shell leaves alone after `key=`.

    Raises ValueError if there is no such user: a folder called `~name` is hardly meant.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~") and "/" in expanded:
        raise ValueError(f"{path}: no such user; expected ~/FOLDER, or ./{path} for a file of that name")
    return expanded
