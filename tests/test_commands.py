"""The command lines that pages for people show: what would run is composed or parsed as it is printed."""

import functools
import importlib
import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.cli import Arguments, UsageError, describe, parse
from common.experiments.definitions import ROOT
from common.launch import cli
from common.launch.compose import compose_config
from scripts import reproduce

TASKS = ("cnn", "gpt2", "transformer")
# Commands that cannot be checked without running them.
UNCHECKED = {
    "python -m nltk.downloader wordnet": "another project's",
    'sbatch --partition=main --nodes=4 --exclusive --wrap="sleep 10"': "a job without a file",
    "sbatch --test-only": "what the project calls itself",
    "python -m scripts.benchmarks.": "the beginning of several",
}
TEMPLATE = re.compile(r"\.\.\.|\b(TASK|NAME|N)\b")  # not to be typed as it stands
TORCHRUN = "python -m torch.distributed.run "


def command_lines(text: str) -> Iterator[str]:
    """Yield what a page shows as code: lines of its blocks, with those that they continue on, and spans in its text."""
    code = re.compile(r"^(?:    [^\n]*|```.*?^```)$", re.MULTILINE | re.DOTALL)
    block = re.compile(r"^```[^\n]*\n(.*?)^```$|^(    (?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE | re.DOTALL)
    for found in block.finditer(text):
        shown = found[1] or re.sub(r"^ {4}", "", found[2], flags=re.MULTILINE)
        yield from shown.replace("\\\n", "").splitlines()  # as a shell reads it
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", code.sub("", text)))


def commands() -> dict[str, str]:
    """Return each command that a README or a page about the results shows, and a page that shows it."""
    found: dict[str, str] = {}
    for page in sorted([*ROOT.rglob("README.md"), *ROOT.glob("results/*.md")]):
        if not any(part.startswith(".") for part in page.relative_to(ROOT).parts):
            for line in command_lines(page.read_text()):
                command = re.sub(r"\s+#.*$", "", line).strip()
                if re.match(r"([A-Z_]+=\S* )*(python -m|torchrun|sbatch) ", command) and not TEMPLATE.search(command):
                    found.setdefault(command, str(page.relative_to(ROOT)))
    return found


COMMANDS = commands()


def test_commands_are_found() -> None:
    pages = set(COMMANDS.values())
    assert pages >= {f"{folder}README.md" for folder in ("", "cnn/", "common/", "gpt2/", "slurm/", "transformer/")}
    assert pages >= {"results/HOWTO.md", "results/speed.md"}
    assert len(COMMANDS) > 80


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in UNCHECKED])
def test_a_command_is_accepted_as_printed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(re.sub(r"^([A-Z_]+=\S* )+", "", command), monkeypatch)


def check(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise an error if a command would be refused."""
    if command.startswith("sbatch "):
        return check_job(re.sub(r"\$\([^)]*\)", "", command), monkeypatch)
    words = shlex.split(command.replace("torchrun ", TORCHRUN), comments=True)
    if command.startswith("torchrun "):
        nodes, ranks = (
            int(re.search(rf"--{key}[= ](\d+)", f"{command} --{key} 1")[1]) for key in ("nnodes", "nproc-per-node")
        )
        monkeypatch.setenv("WORLD_SIZE", str(nodes * ranks))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        words = ["python", *words[words.index("-m", 3) :]]
    module, arguments = words[2], words[3:]
    if module.removesuffix(".train") in TASKS and arguments:
        return check_run(module.removesuffix(".train"), arguments)
    return check_tool(module, arguments)


def check_run(task: str, arguments: list[str]) -> None:
    overrides = [word for word in arguments if word not in ("-m", "--multirun", "--cfg", "job", "--help")]
    if {"-m", "--multirun"} & {*arguments}:
        cli.combinations(task, overrides)
    else:
        composed(task, tuple(overrides))


@functools.cache
def composed(task: str, overrides: tuple[str, ...]) -> None:
    compose_config(task, list(overrides))


def check_tool(module: str, arguments: list[str]) -> None:
    """Parse the arguments of a command of `common.cli`; of a module that is only named it is enough that it exists."""
    package = importlib.util.find_spec(module)
    assert package is not None, f"{module}: no such module"
    if not arguments or arguments == ["--help"]:
        return
    loaded = importlib.import_module(f"{module}.__main__" if package.submodule_search_locations else module)
    loaded = importlib.import_module(loaded.main.__module__)
    if module == "scripts.benchmarks.hosts":
        loaded.read(arguments)
        return
    (kind,) = (
        value
        for value in vars(loaded).values()
        if inspect.isclass(value) and issubclass(value, Arguments) and value.__module__ == loaded.__name__
    )
    parsed = parse(kind, arguments, module, "")
    if module == "scripts.reproduce":
        check_rows(parsed)
    if module == "scripts.emulate":
        check_run("cnn", shlex.split(parsed.run)[2:])


def check_rows(arguments: reproduce.ReproduceArguments) -> None:
    table = reproduce._with_seeds(reproduce.load_table(arguments.table), arguments.seeds)
    reproduce._of_rows(list(table.cells(Path(arguments.runs))), arguments.rows)


def check_job(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check what a file of slurm/ makes of its arguments."""
    words = shlex.split(command, comments=True)
    place = next(index for index, word in enumerate(words) if word.endswith(".sbatch"))
    file, arguments = ROOT / words[place], words[place + 1 :]
    text = file.read_text()
    if file.name == "train.sbatch":
        options = re.findall(r"--(nodes|ntasks-per-node|gpus-per-node)=(\d+)", command)
        sizes = {"nodes": 1, "ntasks-per-node": 1} | {name: int(number) for name, number in options}
        if "gpus-per-node" in sizes:
            sizes["ntasks-per-node"] = sizes["gpus-per-node"]
        if options and "elastic=true" not in arguments:
            monkeypatch.setenv("WORLD_SIZE", str(sizes["nodes"] * sizes["ntasks-per-node"]))
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(sizes["ntasks-per-node"]))
        return check_run(arguments[0], arguments[1:])
    started = re.search(r"exec python -m ([\w.]+) (.*?)\"\$@\"(.*)", text, re.DOTALL)
    assert started is not None, f"{file.name}: starts no command with its arguments"
    if file.name == "table.sbatch":
        table, *arguments = arguments
        return check_tool(started[1], [*shlex.split(started[2].replace("$table", table)), *arguments])
    if started[1].startswith("scripts."):
        return check_tool(started[1], [*shlex.split(started[2]), *arguments, *shlex.split(started[3])])
    return None


def test_a_command_that_would_be_refused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [
        "python -m cnn.train optimizer.lrr=1",
        "torchrun --nproc-per-node 4 -m cnn.train workers.count=3",
        "python -m cnn.train -m seed=1,2 training.steps=-1",
        "python -m scripts.reproduce table=table3 row=x",
        "sbatch slurm/table.sbatch table3 rows=nothing",
        "sbatch --nodes=2 slurm/train.sbatch cnn experimnt=quickstart",
        "python -m common.topology ring world_size=four",
    ]
    for command in wrong:
        with pytest.raises((ValueError, UsageError)):
            check(command, monkeypatch)


def test_every_command_describes_its_keys() -> None:
    modules = [path for path in ROOT.glob("[cgst]*/**/*.py") if "Arguments):" in path.read_text()]
    kinds = {
        value
        for path in modules
        if path.relative_to(ROOT).parts[0] != "tests"
        for value in vars(importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))).values()
        if inspect.isclass(value) and issubclass(value, Arguments) and value.model_fields
    }
    assert len(kinds) > 15
    for kind in kinds:
        text = describe(kind, "module", "")
        assert all(f"\n  {key}=" in text or f"\n  --{key.replace('_', '-')}  " in text for key in kind.model_fields), (
            kind
        )
