import re

import pytest

from scripts import figures, reproduce, tables


@pytest.mark.parametrize(
    ("main", "argv", "message"),
    [
        (reproduce.main, ["table=quikstart"], "table=quikstart: unknown; did you mean 'quickstart'?"),
        (tables.main, ["table=nothing"], "table=nothing: unknown; expected one of: "),
        (figures.main, ["figure=quickstar"], "figure=quickstar: unknown; did you mean 'quickstart'?"),
        (reproduce.main, [], "table=...: missing; expected a file in results/definitions/tables"),
        (reproduce.main, ["table="], "table=None: expected a valid string"),
        (reproduce.main, ["table=quickstart", "rusn=x"], "rusn: unknown key; did you mean 'runs'?"),
        (reproduce.main, ["table=quickstart", "launcher=ssh"], "launcher='ssh': expected 'local' or 'slurm'"),
        (reproduce.main, ["table=quickstart", "--dry"], "unrecognized arguments: --dry"),
        (tables.main, ["table=quickstart", "quickstart"], "quickstart: unknown key"),
        (tables.main, ["table=quickstart", "runs=[1"], "cannot be read as key=value"),
        (tables.main, ["table=quickstart", "--dry-run"], "unrecognized arguments: --dry-run"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(main, argv, message, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("main", [reproduce.main, tables.main, figures.main])
def test_help_names_the_keys(main, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert re.search(r"runs=\.\.\.  the folder that holds the runs.* \(default: .*runs", capsys.readouterr().out)


def test_a_number_may_be_a_folder(capsys):
    assert tables.main(["table=quickstart", "runs=7"]) == 2
    assert "no finished run in 7/quickstart" in capsys.readouterr().err
