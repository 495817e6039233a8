"""What a launcher sets in the environment is checked before any process waits for others."""

import re
import socket
import time
from collections.abc import Mapping

import pytest
import torch

from common.config.config import ConfigError
from common.launch.compose import resolve_workers
from common.parallel.process_groups import open_process_group
from common.rank_environment import check_launcher, find_master

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GOOD = dict(zip(NAMES, ("1", "2", "1", "2", "localhost", "29500"), strict=True))


def announce(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, environment.get(name, ""))


@pytest.mark.parametrize("environment", [{}, GOOD, GOOD | {"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}])
def test_what_launchers_set_is_accepted(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    announce(environment, monkeypatch)
    check_launcher()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 in the environment: expected at least 1"),
        ({"WORLD_SIZE": "1" * 5000}, "in the environment: expected a number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is missing in the environment"),
        ({"RANK": "2"}, "RANK=2 in the environment: expected less than WORLD_SIZE=2"),
        ({"RANK": "-1"}, "RANK=-1 in the environment: expected a number"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 in the environment: expected less than LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK=x in the environment: expected a number"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3 in the environment: expected at most WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0 in the environment: expected at least 1"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is missing in the environment"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is missing in the environment"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT=abc in the environment: expected a number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 in the environment: expected a port from 1 to 65535"),
    ],
)
def test_a_variable_that_does_not_fit_is_named(wrong, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    announce(GOOD | wrong, monkeypatch)
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_workers({"workers": {"kind": "processes"}})
    with pytest.raises(ValueError, match=re.escape(message)):
        open_process_group(torch.device("cpu"), 1)


def test_an_address_that_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    announce(GOOD | {"MASTER_ADDR": "nowhere.invalid"}, monkeypatch)
    known = iter([OSError("no such name"), None, OSError("no such name")])

    def look_up(name: str, port: None) -> None:
        if (error := next(known)) is not None:
            raise error

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    find_master()  # as soon as it is known
    assert "MASTER_ADDR=nowhere.invalid" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"MASTER_ADDR=nowhere\.invalid in the environment: expected an address"):
        find_master(0.0)


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        announce(GOOD | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": port}, monkeypatch)
        with pytest.raises(ValueError, match=f"MASTER_PORT={port} in the environment: .*"):
            open_process_group(torch.device("cpu"), 5)
