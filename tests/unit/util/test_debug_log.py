"""-v, -vv, ENVBUILD_LOG and --debug: events are shown, and no secret."""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests

from envbuild.util import atomic_files, debug_log, host_processes
from envbuild.util.errors import FileError
from envbuild.util.http_deadlines import Adapter
from envbuild.util.network_settings import Network
from unit.served import served

LOG = logging.getLogger("envbuild.test")


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Restore the previous log handlers afterwards."""
    root = logging.getLogger("envbuild")
    handlers, level = list(root.handlers), root.level
    yield
    for added in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(added)
        added.close()
    root.setLevel(level)


class NotFound(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_a_process_is_shown_with_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    debug_log.log_to_stderr(1)
    host_processes.run([sys.executable, "-c", "import sys; print('a word'); sys.exit(3)"], env={"NAME": "of a value"})
    text = shown(capsys)
    assert f"run {sys.executable} -c 'import sys;" in text and "ended with 3 after" in text
    assert "a word\n" not in text and "of a value" not in text


def test_twice_v_shows_what_it_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    debug_log.log_to_stderr(1)
    debug_log.log_to_stderr(2)
    host_processes.run([sys.executable, "-c", "print('a word')"], env={"NAME": "of a value"})
    text = shown(capsys)
    assert ": a word\n" in text and "with the variables NAME\n" in text and "of a value" not in text
    assert text.count("ended with 0") == 1, "the second call replaces the first"


def test_a_file_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    debug_log.log_to_stderr(1)
    atomic_files.write_atomically(tmp_path / "x", "12345")
    assert f"wrote {tmp_path / 'x'}, 5 bytes" in shown(capsys)


def test_a_request_is_shown_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    debug_log.log_to_stderr(1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), NotFound)
    host = f"127.0.0.1:{server.server_port}"
    with served(server), requests.Session() as session:
        session.mount("http://", Adapter(Network()))
        session.get(f"http://user:pass-word@{host}/missing?signature=secret")
        text = shown(capsys)
        assert f"GET http://{host}/missing: 404 after" in text
        assert "pass-word" not in text and "secret" not in text


def test_nothing_is_shown_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    host_processes.run([sys.executable, "-c", "print('a word')"])
    assert shown(capsys) == ""


@pytest.mark.parametrize(
    "name", ["ENVBUILD_KEY_PASSPHRASE", "HF_TOKEN", "TWINE_PASSWORD", "AWS_SECRET_ACCESS_KEY", "MY_API_KEY"]
)
def test_values_of_secret_variables_are_masked(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "abc-123-xyz")
    debug_log.log_to_stderr(2)
    LOG.info("it is abc-123-xyz")
    host_processes.run([sys.executable, "-c", "import os; print(os.environ['" + name + "'])"])
    text = shown(capsys)
    assert "it is ***" in text and "abc-123-xyz" not in text


@pytest.mark.parametrize(
    "text",
    [
        "https://user:pass-word@index.example/simple/",
        "Authorization: Bearer pass-word.pass-word",
        "Authorization: Basic pass-word==",
        "https://files.example/x.whl?token=pass-word",
    ],
)
def test_credentials_are_masked(text: str) -> None:
    assert "pass-word" not in debug_log.masked(f"before {text} after")
    assert debug_log.masked(f"before {text} after").startswith("before ")


def test_everything_goes_to_the_file_that_only_its_owner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "log"
    monkeypatch.setenv("ENVBUILD_LOG", str(file))
    debug_log.log_to_file()
    host_processes.run([sys.executable, "-c", "print('a word')"])
    text = file.read_text(encoding="utf-8")
    assert ": a word\n" in text and f" {os.getpid()} info envbuild.util.host_processes run " in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVBUILD_LOG", str(tmp_path))
    with pytest.raises(FileError, match=r"ENVBUILD_LOG: .* cannot be written: Is a directory"):
        debug_log.log_to_file()


def test_control_characters_and_long_lines_do_not_reach_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    debug_log.log_to_stderr(1)
    LOG.info("red \x1b[31m %s", "x" * 10_000)
    text = shown(capsys)
    assert "\x1b" not in text and len(text) < 5000 and "(100" in text
