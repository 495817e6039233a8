"""What was probably meant: the only place that compares spellings, light enough for `import common.topology`."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the known word that is spelled most like `word`, or "" if none is close."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def nearest(word: object, known: Iterable[str]) -> str:
    """Return what is expected of a name: "did you mean 'x'? expected one of: w, x"."""
    known = sorted(known)
    return f"{did_you_mean(word, known)} expected one of: {', '.join(known)}".removeprefix(";").lstrip()
