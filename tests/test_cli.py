import errno
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field

import cnn.prepare
import gpt2.prepare
import transformer.evaluate
import transformer.prepare
from common.cli import Arguments, Folders, Text, UsageError, command_of, main_function, parse
from scripts import emulate, figures, keep, reproduce, tables


@pytest.mark.parametrize(
    ("main", "argv", "message"),
    [
        (reproduce.main, ["table=quikstart"], "table=quikstart: unknown; did you mean 'quickstart'?"),
        (tables.main, ["table=nothing"], "table=nothing: unknown; expected one of: "),
        (figures.main, ["figure=quickstar"], "figure=quickstar: unknown; did you mean 'quickstart'?"),
        (reproduce.main, [], "table=...: missing; expected a file in results/definitions/tables"),
        (reproduce.main, ["table="], "table='': String should have at least 1 character"),
        (reproduce.main, ["table=quickstart", "rusn=x"], "rusn: unknown key; did you mean 'runs'?"),
        (reproduce.main, ["table=quickstart", "launcher=ssh"], "launcher='ssh': expected 'local' or 'slurm'"),
        (reproduce.main, ["table=quickstart", "--dry"], "dry: unknown key; did you mean 'dry_run'?"),
        (tables.main, ["table=quickstart", "quickstart"], "quickstart: unknown key"),
        (tables.main, ["table=quickstart", "runs=[1"], "cannot be read as key=value"),
        (tables.main, ["runs=x", "--keep"], "runs=x: expected no other key without table=..."),
        (tables.main, ["table=quickstart", "--dry-run"], "dry_run: unknown key"),
        (reproduce.main, ["table=quickstart", f"seeds={'1' * 5000}"], "expected integers, as seeds=1,2"),
        (
            keep.main,
            ["table=quickstart", "runs=results/runs", "output=results/runs/"],
            "output=results/runs/: expected",
        ),
        (cnn.prepare.main, ["source=x", "workers=100000"], "workers=100000: expected less than or equal to 1024"),
        (gpt2.prepare.main, ["processes=100000", "output=x", "source=x"], "processes=100000: expected less than"),
        (transformer.prepare.main, ["output=x", "jobs=100000"], "jobs=100000: expected less than"),
        (transformer.evaluate.main, ["run=x", "threads=100000"], "threads=100000: expected less than"),
        (emulate.main, ["delay_ms=inf", "run=-m x"], "delay_ms='inf': expected a finite number"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(main, argv, message, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


class Sample(Arguments):
    positional = "what"

    what: Text = Field(description="first word")
    some_folder: Text = Field("runs", description="folder")
    runs: Folders = Field(("runs",), description="folders")
    more: Text | None = Field(None, description="options")
    count: int | None = Field(3, description="number")
    options: dict[str, int] = Field({}, description="mapping")
    dry_run: bool = Field(False, description="only print")


@pytest.mark.parametrize(
    ("spellings", "expected"),
    [
        (["some_folder=a=b", "--some-folder=a=b", "--some-folder a=b"], {"some_folder": "a=b"}),
        (["some_folder=007", "--some-folder 007"], {"some_folder": "007"}),
        (["count=null", "--count null", "--count=null"], {"count": None}),
        (["count=-1", "--count -1"], {"count": -1}),
        (["dry_run=true", "--dry-run", "--dry-run=true", "--dry_run"], {"dry_run": True}),
        (["dry_run=false", "--dry-run=false"], {}),
        (["more=007", "--more 007"], {"more": "007"}),
        (["more=null runs=2025_01_15", "--runs=2025_01_15"], {"runs": ("2025_01_15",)}),
        (["runs=on runs=[b]", "runs=on --runs b", "runs=['on',b]"], {"runs": ("on", "b")}),
        (["runs=[a,b]", "--runs [a,b]", "runs=a --runs b", "--runs a runs=[b]"], {"runs": ("a", "b")}),
        (
            ["options.k=2 options.l=3", "options={k: 2, l: 3}", "--options k=2 --options=l=3"],
            {"options": {"k": 2, "l": 3}},
        ),
    ],
)
def test_spellings_mean_the_same(spellings, expected):
    for spelling in spellings:
        words = [spelling] if "{" in spelling else spelling.split()
        for argv in (["x", *words], [*words, "x"], [*words, "what=x"]):
            parsed = parse(Sample, argv, "some.module", "About it.")
            assert parsed == Sample(**{"what": "x"} | expected), argv


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["x", "y"], "y: unknown key; expected one of: count, dry_run"),
        (["x", "--some-folder"], "some_folder: expected some_folder=VALUE"),
        (["x", "--count", "--dry-run"], "count: expected count=VALUE"),
        (["x", "dry_run"], "dry_run: expected --dry-run"),
        ([], "what=...: missing; expected first word"),
    ],
)
def test_words_that_are_no_settings(argv, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(Sample, argv, "some.module", "About it.")


def test_a_command_gives_its_arguments_again():
    arguments = Sample(what="a b", count=None, runs=("a", "b"), dry_run=True)
    command = command_of("some.module", arguments)
    assert command == "python -m some.module 'what=a b' 'runs=[a,b]' count=null --dry-run"
    assert parse(Sample, shlex.split(command)[3:], "some.module", "About it.") == arguments


def test_the_home_folder_is_found_in_any_spelling(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    parsed = parse(Sample, ["~ is a tilde", "some_folder=~/a", "runs=[~/b,c]"], "some.module", "About it.")
    assert (parsed.what, parsed.some_folder, parsed.runs) == ("~ is a tilde", "/somewhere/a", ("/somewhere/b", "c"))
    odd = {"runs": "runs #2", "more": "--comment='lr: 3'"}
    assert parse(Sample, ["x", *(f"{key}={value}" for key, value in odd.items())], "m", "d") == Sample(what="x", **odd)
    with pytest.raises(UsageError, match="some_folder='~nobody-of-that-name/x': ~nobody-of-that-name/x: no such user"):
        parse(Sample, ["x", "some_folder=~nobody-of-that-name/x"], "some.module", "About it.")


def test_a_reader_that_leaves_ends_a_command_in_silence():
    program = "import sys, common.cli; sys.exit(common.cli.main_function(lambda argv: print('a plan'))())"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


@pytest.mark.parametrize("main", [reproduce.main, tables.main, figures.main])
def test_help_names_the_keys(main, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert re.search(r"runs=\.\.\.  the folder that holds the runs.* \(default: .*runs", capsys.readouterr().out)


def test_a_path_that_cannot_be_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main_function(lambda argv: (tmp_path / "file/sub").mkdir(parents=True))([]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/file/sub: Not a directory\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OSError(errno.ENOSPC, "No space left", "there"), 1, "error: there: No space left\n"),
        (OSError(errno.EROFS, "Read-only file system", "there"), 2, "error: there: Read-only file system\n"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "there"), 2, "error: there: File name too long\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_what_happens_to_a_command_is_one_line(error: BaseException, code: int, message: str, capsys) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    assert main_function(fail)([]) == code
    assert capsys.readouterr().err == message


def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "common.topology", "ring", "world_size=3"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: output: No space left on device\n")
