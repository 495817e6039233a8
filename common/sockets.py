"""Sockets of local processes."""

import multiprocessing.util
import os
import tempfile

LONGEST = 70  # bytes of TMPDIR: Linux takes 107 for a socket's whole path, of which multiprocessing adds up to 32


def shorten_socket_paths() -> None:
    """Let multiprocessing keep its sockets in /tmp where TMPDIR is too long for them. Call it before its first one."""
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST:
        chosen, tempfile.tempdir = tempfile.tempdir, "/tmp"
        try:
            multiprocessing.util.get_temp_dir()  # made once, and used from then on
        finally:
            tempfile.tempdir = chosen
