"""Command lines of all commands but training: `key=value` and `--flag`, validated by pydantic.

`--some-key VALUE` and `--some-key=VALUE` are spellings of `some_key=VALUE`, and `--some-flag` of `some_flag=true`.
"""

import errno
import functools
import json
import logging
import os
import re
import shlex
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from yaml import YAMLError

from common.arguments import did_you_mean, expand_home, nearest

Text = Annotated[str, Field(min_length=1)]
ONE_OR_SEVERAL = BeforeValidator(lambda value: value if isinstance(value, list | tuple) else [value])  # a, [a,b]
AT_COMMAS = BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value)  # a,b is [a,b] too
Folders = Annotated[tuple[Text, ...], ONE_OR_SEVERAL, Field(min_length=1)]
Names = Annotated[tuple[Text, ...], ONE_OR_SEVERAL, AT_COMMAS, Field(min_length=1)]  # the last validator runs first
SHOWN = 100  # characters of a wrong value in a message
# Errors that mean a wrong path; any other can happen with a correct one.
OF_PATHS = {
    *(errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR),
    *(errno.EPERM, errno.EROFS),
}
DEFAULT_RUNS = ("runs", "results/runs")  # your own runs, then the kept ones


class UsageError(ValueError):
    """Something the user typed or configured is wrong: one clear line on stderr and exit code 2."""


class Arguments(BaseModel):
    """Arguments of a command; `bool` fields are flags (dry_run: --dry-run).

    positional:  the key whose value may be typed without `key=`
    """

    # Numbers are taken as text too: data=7 is a folder called 7.
    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)
    positional: ClassVar[str | None] = None

    @field_validator("*")
    @classmethod
    def _expanded(cls, value: Any) -> Any:
        """Expand `~/` in texts: a shell does so only in some spellings."""
        if isinstance(value, tuple):
            return tuple(expand_home(item) if isinstance(item, str) else item for item in value)
        return expand_home(value) if isinstance(value, str) else value

    @classmethod
    def hint(cls, argv: Sequence[str]) -> str:
        """Return a hint to add to the error for an unknown key that is not a misspelling."""
        return ""


ArgumentsT = TypeVar("ArgumentsT", bound=Arguments)


def parse(arguments: type[ArgumentsT], argv: Sequence[str], module: str, description: str) -> ArgumentsT:
    """Return the command line as `arguments`; print the keys and exit for --help.

    Raises UsageError naming key, value and what was expected.
    """
    if "--help" in argv or "-h" in argv:
        print(describe(arguments, module, description))
        sys.exit(0)
    text, others = {}, {}
    for key, value in _settings(arguments, argv):
        kind = _type(arguments, key.partition(".")[0])
        earlier = text.pop(key, None) or others.get(key)
        if get_origin(kind) is tuple and earlier:  # topology=ring topology=aer is topology=[ring,aer]
            others[key] = f"[{_items(earlier)},{_items(value)}]"
        elif _is_text(kind, value):  # as typed; everything else is YAML, as in Hydra
            text[key] = value
        else:
            others[key] = value
    settings = [f"{key}={value}" for key, value in others.items()]
    try:
        values = OmegaConf.to_container(OmegaConf.from_cli(settings))
    except (YAMLError, ValueError, RecursionError, OmegaConfBaseException) as error:
        raise UsageError(f"{shlex.join(settings)}: cannot be read as key=value ({one_line(error)})") from None
    try:
        return arguments.model_validate(values | text)
    except ValidationError as error:
        raise UsageError(explain(error, arguments)) from None


def command_of(module: str, arguments: Arguments) -> str:
    """Return the shell command that gives `arguments`, without those that equal their defaults."""
    parts = ["python", "-m", module]
    for name, field in type(arguments).model_fields.items():
        value = getattr(arguments, name)
        if value != field.default:
            parts.append(_flag(name) if value is True else f"{name}={_typed(value)}")
    return shlex.join(parts)


def main_function(function: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Decorate a command's main(argv) -> exit code: usage errors become one line and exit code 2.

    So do wrong paths. Other file errors, such as a full disk, exit with 1, and Ctrl-C with 130.
    """

    @functools.wraps(function)
    def main(argv: Sequence[str] | None = None) -> int:
        logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
        try:
            try:
                return function(sys.argv[1:] if argv is None else argv)
            finally:
                sys.stdout.flush()
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except BrokenPipeError:
            drop_output()
            return 128 + signal.SIGPIPE  # the reader is gone (`| head`): the code of commands that this signal ends
        except OSError as error:
            if error.strerror is None:  # not a file error
                raise
            if error.filename is None:
                drop_output()
            print(f"error: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
            return 2 if error.errno in OF_PATHS else 1
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 128 + signal.SIGINT

    return main


def drop_output() -> None:
    """Keep Python from retrying the failed write as it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def words_of(key: str, text: str | None) -> list[str]:
    """Split a text into words as a shell does; raise UsageError naming `key` if a shell could not."""
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise UsageError(f"{key}={text}: expected words as in a shell ({error})") from None


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return one line for a pydantic error: `key=value: expectation; ...`, with the nearest known key."""
    return "; ".join(explain_mistake(item, model) for item in error.errors())


def explain_mistake(item: Mapping[str, Any], model: type[BaseModel]) -> str:
    """Return one of `ValidationError.errors()` as `key=value: expectation`."""
    keys, holder = locate(item["loc"], model)
    key, value = ".".join(keys) or "(top level)", repr(item["input"])
    match item["type"]:
        case "extra_forbidden":
            return f"{key}: unknown key; {nearest(keys[-1], holder.model_fields)}"
        case "missing":
            field = holder.model_fields.get(keys[-1])  # None for an item of a list
            return f"{key}=...: missing; expected {(field and field.description) or 'a value'}"
        case "union_tag_invalid":
            names, tag = item["ctx"]["expected_tags"], item["ctx"]["discriminator"].strip("'")
            return f"{key}.{tag}={item['ctx']['tag']}: expected one of {names}"
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    if item["type"] == "literal_error":
        message += did_you_mean(item["input"], re.findall("'([^']*)'", item["ctx"]["expected"]))
    shown = value if len(value) <= SHOWN else f"{value[: SHOWN - 3]}..."
    return f"{key}={shown}: {message}" if keys else message


def locate(location: Sequence[str | int], model: type[BaseModel]) -> tuple[list[str], type[BaseModel]]:
    """Return the keys of a mistake as a user types them, and the model that holds the last one.

    location: pydantic's, in which the tag of a discriminated union ("adam") follows its key
    """
    keys, holder, inside, union = [], model, model, None
    for part in location:
        if union is not None and union.discriminator:
            kinds, tag = get_args(union.annotation), union.discriminator
            tagged = (kind for kind in kinds if part in get_args(kind.model_fields[tag].annotation))
            inside, union = next(tagged, inside), None
            continue
        keys.append(str(part))
        holder, union = inside, inside.model_fields.get(part)
        if union is not None:  # else an index of a list, or a key of a mapping
            candidates = (union.annotation, *get_args(union.annotation))
            inside = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), inside)
    return keys, holder


def one_line(error: Exception) -> str:
    """Return a library's message without its line breaks."""
    return " ".join(str(error).split())


def _settings(arguments: type[Arguments], argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (key, value) of each word in any spelling; raise UsageError for unknown keys and missing values."""
    words, positional = deque(argv), arguments.positional
    while words:
        word = words.popleft()
        dashed = word.startswith("--")
        key, equals, value = word.partition("=")
        if dashed:
            key = key[2:].replace("-", "_")
        elif positional and not equals:
            key, equals, value, positional = positional, "=", word, None
        field = key.partition(".")[0]
        if field not in arguments.model_fields:
            known = nearest(field, arguments.model_fields)
            more = "" if known.startswith("did you mean") and field == key else arguments.hint(argv)
            raise UsageError(f"{key}: unknown key; {known}{more}")
        kind = _type(arguments, field)
        if dashed and not equals and kind is bool:
            equals, value = "=", "true"
        elif dashed and not equals and words and not words[0].startswith("--"):
            equals, value = "=", words.popleft()
        if not equals:
            raise UsageError(f"{key}: expected {_flag(key)}" if kind is bool else f"{key}: expected {key}=VALUE")
        if get_origin(kind) is dict and key == field and "=" in value:  # --option k=2 is option.k=2
            entry, _, value = value.partition("=")
            key = f"{key}.{entry}"
        yield key, value


def _is_text(kind: Any, value: str) -> bool:
    """Return whether a value is a text as typed: not null where that is allowed, and not [a,b] for several texts."""
    kinds = {getattr(part, "__origin__", part) for part in get_args(kind) or (kind,)}
    if kinds == {str, ...}:
        return value[:1] not in ("", "[")
    return kind is str or (kinds == {str, NoneType} and value not in ("", "null"))


def _items(value: str) -> str:
    """Return what stands in the brackets of a list in YAML."""
    return value.strip("[]") if value[:1] == "[" else ",".join(map(json.dumps, value.split(",")))


def describe(arguments: type[Arguments], module: str, description: str) -> str:
    """Return what --help prints."""
    flags = [name for name in arguments.model_fields if _type(arguments, name) is bool]
    first = f" {arguments.positional.upper()}" if arguments.positional else ""
    usage = f"python -m {module}{first} KEY=VALUE ..." + "".join(f" [{_flag(name)}]" for name in flags)
    keys = "\n".join(f"  {_describe(arguments, key)}" for key in arguments.model_fields if key not in flags)
    shown = "\n".join(f"  {_flag(name)}  {arguments.model_fields[name].description}" for name in flags)
    return f"usage: {usage}\n\n{description}\n\nkeys:\n{keys}" + (f"\n\nflags:\n{shown}" if flags else "")


def _type(model: type[BaseModel], key: str) -> Any:
    return model.model_fields[key].annotation


def _describe(model: type[BaseModel], key: str) -> str:
    field = model.model_fields[key]
    default = "" if field.is_required() else f" (default: {_typed(field.default)})"
    return f"{key}=...  {field.description or ''}{default}"


def _typed(value: object) -> str:
    """Return a value as a user types it."""
    if value is None:
        return "null"
    if not isinstance(value, tuple):
        return str(value)
    return str(value[0]) if len(value) == 1 else f"[{','.join(map(str, value))}]"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
