"""python -m common.topology: table, picture and refusals."""

import pytest
from PIL import Image

from common.topology.__main__ import main


def rows_of(text):
    """Return the cells of the table of rounds, split where two or more blanks follow each other."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if set(line) == {"-", " "})
    body = lines[start + 1 : lines.index("", start)]
    header = " ".join(lines[start - 1].split())
    assert header == "round structure transport worker 0 S/worker S/host contraction so far"
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in body]


def test_table_of_one_peer_exponential(capsys):
    main(["one_peer_exponential", "world_size=16", "workers_per_host=4"])
    text = capsys.readouterr().out
    assert text.startswith("one_peer_exponential: 16 workers on 4 hosts\n")
    assert "period               4 rounds" in text
    assert "rounds to consensus  4 (exact average)" in text
    assert "symmetric            no" in text
    rows = rows_of(text)
    assert [row[:2] for row in rows] == [["0", "i <- i+1"], ["1", "i <- i+2"], ["2", "i <- i+4"], ["3", "8 pairs"]]
    assert [row[2] for row in rows] == ["send_recv"] * 4
    assert [row[-4] for row in rows] == ["1.00"] * 4
    assert [row[-3] for row in rows] == ["1.00", "2.00", "4.00", "4.00"]
    assert rows[-1][-1] == "0"


def test_table_of_aer(capsys):
    main(["aer", "world_size=8", "workers_per_host=2", "rounds=2"])
    rows = rows_of(capsys.readouterr().out)
    assert rows == [
        ["0", "1 group of 4, 2 pairs", "hierarchical", "<-> 1", "1.50", "1.00", "1.0000", "1.0000"],
        ["1", "1 group of 4, 2 pairs", "hierarchical", "<-> 1-3", "1.50", "1.00", "1.0000", "1.0000"],
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["random_matching", "world_size=5", "option.seed=3"], "period               none (random)"),
        (["random_matching", "world_size=5", "option.idle_rounds=1"], "idle         -"),
        (["ring", "world_size=1"], "1 worker on 1 host"),
        (["ring", "world_size=6"], "57 (to 1e-10)"),
        (["star", "world_size=6"], "graph, 1-5 peers"),
        (["complete", "world_size=6"], "all 6"),
        (["complete", "world_size=6", "workers_per_host=6"], "1.67      0.00"),
        (["base_k", "world_size=7", "option.k=1"], "weighted pairs, 1 idle"),
        (["static_exponential", "world_size=6"], "directed, 3 peers"),
        (["ring", "world_size=16", "option.idle_rounds=30"], "more than 10000"),
    ],
)
def test_tables_of_others(capsys, arguments, expected):
    main(arguments)
    assert expected in capsys.readouterr().out


def test_file_options_from_the_command_line(capsys, tmp_path):
    path = tmp_path / "g.txt"
    path.write_text("0 1\n1 2\n2 0\n0 2\n")
    options = [f"path={path}", "directed=true", "weights=push_sum"]
    main(["file", "world_size=3", *(f"option.{option}" for option in options)])
    assert "doubly stochastic    no (needs push-sum)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rign", "world_size=4"], "did you mean 'ring'?"),
        (["ring", "world_size=four"], "world_size='four': expected a valid integer"),
        (["ring"], "world_size=...: missing; expected number of workers"),
        (["ring", "aer", "world_size=4"], "aer: unknown key"),
        (["aer", "world_size=4", "ranks_per_host=2"], "did you mean 'workers_per_host'?"),
        (["ring", "world_size=4", "rounds=0"], "rounds=0: expected greater than 0"),
        (["ring", "world_size=4", "option=k"], "option='k': expected a valid dictionary"),
        (["ring", "world_size=4", "option.k=1"], "expected names among idle_rounds, between_hosts; got 'k'"),
        (["ring", "world_size=4", "plot=x.unknown"], "not supported"),
        (["ring", "world_size=4", "plot=/no/such/folder/x.png"], "No such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "panels"),
    [
        (["aer", "world_size=16", "workers_per_host=4"], (4, 1)),
        (["one_peer_exponential", "world_size=7", "rounds=5"], (3, 2)),
        (["ring", "world_size=1"], (2, 1)),
    ],
)
def test_picture(capsys, tmp_path, arguments, panels):
    path = tmp_path / "picture.png"
    main([*arguments, f"plot={path}"])
    with Image.open(path) as image:
        width, height = image.size
        colours = image.convert("RGB").getcolors(maxcolors=width * height)
    assert width / panels[0] == pytest.approx(2.8 * 160, abs=2)
    assert height / panels[1] > 2.8 * 160
    white = max(count for count, colour in colours if colour == (255, 255, 255))
    assert 0.3 < white / (width * height) < 0.995  # something is drawn, on white
