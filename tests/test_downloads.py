"""Downloads: they go on where they stopped, and only what is right gets the name."""

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from common.cli import UsageError
from common.downloads import fetch

CONTENT = bytes(range(256)) * 20
SHA256, MD5 = hashlib.sha256(CONTENT).hexdigest(), hashlib.md5(CONTENT).hexdigest()


class Server:
    """Serves CONTENT as /a.tgz, and can break off after some bytes; `ranges` has the Range headers that came."""

    def __init__(self) -> None:
        self.content, self.breaks_after, self.supports_ranges = CONTENT, None, True
        self.ranges: list[str | None] = []


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.ranges.append(wanted)
            begin = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and state.supports_ranges else 0
            if self.path != "/a.tgz" or begin >= len(state.content):
                self.send_error(404 if self.path != "/a.tgz" else 416)
                return
            self.send_response(206 if wanted and state.supports_ranges else 200)
            self.send_header("Content-Length", str(len(state.content) - begin))
            if "gzip" in self.headers.get("Accept-Encoding", ""):
                self.send_header("Content-Encoding", "gzip")  # what some servers say of a .tgz
            self.end_headers()
            end = None if state.breaks_after is None else begin + state.breaks_after
            self.wfile.write(state.content[begin:end])

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
        state.url = f"http://127.0.0.1:{listening.server_port}/a.tgz"
        yield state
        listening.shutdown()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "archives ü" / "a.tgz"


@pytest.mark.parametrize("supports_ranges", [True, False])
def test_a_download_goes_on_where_it_broke_off(
    server: Server, file: Path, supports_ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.downloads.BLOCK", 1000)  # a block that is not whole is lost
    server.breaks_after, server.supports_ranges = 3000, supports_ranges
    with pytest.raises(UsageError, match=r"a\.tgz: cannot be downloaded from .* bytes read.*Call this again to go on"):
        fetch(server.url, file, sha256=SHA256)
    assert not file.exists()
    server.breaks_after = None
    assert fetch(server.url, file, bytes=len(CONTENT), sha256=SHA256, md5=MD5) == {
        "bytes": len(CONTENT), "sha256": SHA256, "md5": MD5,
    }  # fmt: skip
    assert fetch(server.url, file, sha256=None) == {"bytes": len(CONTENT), "sha256": SHA256, "md5": None}
    assert server.ranges == [None, "bytes=3000-"]
    assert file.read_bytes() == CONTENT
    assert {each.name for each in file.parent.iterdir()} == {"a.tgz", "a.tgz.lock"}


@pytest.mark.parametrize("left", [CONTENT, CONTENT + b"more", b"the beginning of something else"])
def test_what_is_left_is_whole_or_is_removed(server: Server, file: Path, left: bytes) -> None:
    file.parent.mkdir()
    (file.parent / "a.tgz.partial").write_bytes(left)
    if left != CONTENT:
        with pytest.raises(UsageError, match=r"a\.tgz\.partial: sha256 is .*; it is damaged .* it was removed: call"):
            fetch(server.url, file, sha256=SHA256)
        assert not file.exists()
    assert fetch(server.url, file, sha256=SHA256)["sha256"] == SHA256


def test_a_dead_link_says_where_to_put_the_file(server: Server, file: Path) -> None:
    url = server.url.replace("a.tgz", "b.tgz")
    with pytest.raises(UsageError, match=rf"a\.tgz: cannot be downloaded from {url} \(404 .*put it at {file}"):
        fetch(url, file)
    file.write_bytes(CONTENT)
    assert fetch(url, file)["sha256"] == SHA256


@pytest.mark.parametrize("known", [{"bytes": 1}, {"sha256": "0" * 64}, {"md5": "0" * 32}])
def test_a_file_that_is_another_one_is_refused_and_kept(server: Server, file: Path, known: dict) -> None:
    (name,) = known
    file.parent.mkdir()
    file.write_bytes(CONTENT)
    with pytest.raises(UsageError, match=rf"a\.tgz: {name} is .*, expected {known[name]}; .*remove it to download it"):
        fetch(server.url, file, **known)
    assert file.read_bytes() == CONTENT
    assert server.ranges == []


def test_several_at_once_download_once(server: Server, file: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fetch, [server.url] * 4, [file] * 4))
    assert len(server.ranges) == 1
    assert file.read_bytes() == CONTENT
