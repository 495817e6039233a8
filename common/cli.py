"""Command lines of the scripts: `key=value` as in Hydra, plus `--flags`, validated by pydantic."""

import argparse
import difflib
import functools
import logging
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NoReturn, TypeVar, get_args

from omegaconf import OmegaConf
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from yaml import YAMLError

Text = Annotated[str, Field(min_length=1)]
# One folder or several: runs=a, runs=[a,b].
Folders = Annotated[
    tuple[Text, ...], BeforeValidator(lambda v: v if isinstance(v, list | tuple) else [v]), Field(min_length=1)
]
DEFAULT_RUNS = ("runs", "results/runs")  # one's own runs, then those that are kept


class UsageError(ValueError):
    """Something the user typed or configured is wrong: one clear line on stderr and exit code 2."""


class Arguments(BaseModel):
    """What a script takes: `bool` fields are flags (dry_run: --dry-run), all others key=value."""

    # Numbers are taken as text too: runs=7 is a folder called 7.
    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)


ArgumentsT = TypeVar("ArgumentsT", bound=Arguments)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


def parse(arguments: type[ArgumentsT], argv: Sequence[str], module: str, description: str) -> ArgumentsT:
    """Turns a command line into `arguments`; raises UsageError naming key, value and what was expected."""
    flags = {name for name, field in arguments.model_fields.items() if field.annotation is bool}
    keys = [name for name in arguments.model_fields if name not in flags]
    epilog = "\n".join(f"  {_describe(arguments, key)}" for key in keys)
    parser = _Parser(
        prog=f"python -m {module}",
        usage=f"python -m {module} KEY=VALUE ..." + "".join(f" [{_flag(name)}]" for name in flags),
        description=description,
        epilog=f"keys:\n{epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("settings", nargs="*", help=argparse.SUPPRESS)
    for name in flags:
        parser.add_argument(_flag(name), action="store_true", help=arguments.model_fields[name].description)
    typed = vars(parser.parse_intermixed_args(argv))
    settings = typed.pop("settings")
    try:
        values = OmegaConf.to_container(OmegaConf.from_cli(settings))
    except YAMLError as error:
        raise UsageError(f"{shlex.join(settings)}: cannot be read as key=value ({one_line(error)})") from None
    given = {name: value for name, value in typed.items() if value}
    try:
        return arguments.model_validate({**values, **given})
    except ValidationError as error:
        raise UsageError(explain(error, arguments)) from None


def command_of(module: str, arguments: Arguments) -> str:
    """The shell command that gives `arguments`, without those that equal their defaults."""
    parts = ["python", "-m", module]
    for name, field in type(arguments).model_fields.items():
        value = getattr(arguments, name)
        if value != field.default:
            parts.append(_flag(name) if value is True else f"{name}={_typed(value)}")
    return shlex.join(parts)


def main_function(function: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Decorator of a script's main(argv) -> exit code: usage errors become one line and exit code 2."""

    @functools.wraps(function)
    def main(argv: Sequence[str] | None = None) -> int:
        logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
        try:
            return function(sys.argv[1:] if argv is None else argv)
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return main


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line for a pydantic error: `key=value: expectation; ...`, with the nearest known key."""
    return "; ".join(_explain_one(item, model) for item in error.errors())


def nearest(word: str, known: Iterable[str]) -> str:
    """The expectation of a name: the known ones, the nearest one first."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}expected one of: {', '.join(known)}"


def one_line(error: Exception) -> str:
    """A library's message without its line breaks."""
    return " ".join(str(error).split())


def _explain_one(item: Any, model: type[BaseModel]) -> str:
    location, kind = item["loc"], item["type"]
    key = ".".join(map(str, location)) or "(top level)"
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {nearest(str(location[-1]), _model_at(model, location).model_fields)}"
    if kind == "missing":
        field = _model_at(model, location).model_fields[location[-1]]
        return f"{key}=...: missing; expected {field.description or 'a value'}"
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return f"{key}={item['input']!r}: {message}" if location else message


def _model_at(model: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel]:
    """The model that holds the last key of `location`."""
    for part in location[:-1]:
        if part in model.model_fields:  # else an index of a list, or a key of a mapping
            annotation = model.model_fields[part].annotation
            candidates = (annotation, *get_args(annotation))
            model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), model)
    return model


def _describe(model: type[BaseModel], key: str) -> str:
    field = model.model_fields[key]
    default = "" if field.is_required() else f" (default: {_typed(field.default)})"
    return f"{key}=...  {field.description or ''}{default}"


def _typed(value: object) -> str:
    """A value as one types it."""
    if not isinstance(value, tuple):
        return str(value)
    return str(value[0]) if len(value) == 1 else f"[{','.join(value)}]"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
