from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from envbuild.doctor import network_reachability_reader
from envbuild.fetch import index_config, index_pages, uv_config, wheel_resolution_and_download
from envbuild.util.errors import SettingsError
from envbuild.util.host_processes import Completed, ProcessTimeout
from unit.conftest import forget
from unit.served import served
from unit.support import Index, quick_pip, serving, write_wheel


def configured(monkeypatch: pytest.MonkeyPatch, *lines: str) -> dict[str, str]:
    """Return uv's environment variables for this output of `pip config list`."""
    completed = Completed(0, "".join(f"{line}\n" for line in lines), "")
    monkeypatch.setattr(index_config, "run", lambda argv, timeout: completed)
    forget()
    return dict(index_config.uv_environment())


def test_a_pip_that_does_not_start_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr(index_config, "PIP_SECONDS", 0.3)
    forget()
    with pytest.raises(ProcessTimeout):
        index_config.uv_environment()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], {}),
        (["global.index-url='http://a.example/simple'"], {"UV_DEFAULT_INDEX": "http://a.example/simple"}),
        (
            ["global.extra-index-url='\\nhttp://a.example/s\\nhttp://b.example/s'"],
            {"UV_INDEX": "http://a.example/s http://b.example/s", "UV_INDEX_STRATEGY": "unsafe-best-match"},
        ),
        (["global.find-links='/a\\nhttp://b.example/x'"], {"UV_FIND_LINKS": "/a,http://b.example/x"}),
        (["global.trusted-host='a.example b.example:80'"], {"UV_INSECURE_HOST": "a.example b.example:80"}),
        (["global.cert='/ca.pem'"], {"SSL_CERT_FILE": "/ca.pem"}),
        (["global.no-index='false'"], {}),
        (["global.index-url='http://g'", "install.index-url='http://i'"], {"UV_DEFAULT_INDEX": "http://i"}),
        (["install.find-links='/i'", "global.find-links='/g'"], {"UV_FIND_LINKS": "/i"}),
        ([":env:.index-url='http://e'", "install.index-url='http://i'"], {"UV_DEFAULT_INDEX": "http://e"}),
        (["download.index-url='http://d'", "wheel.find-links='/w'"], {}),
        (["no line of a setting"], {}),
    ],
)
def test_the_configuration_of_pip_is_passed_to_uv(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], expected: dict[str, str]
) -> None:
    assert configured(monkeypatch, *lines) == expected


@pytest.mark.parametrize(
    ("lines", "variables", "expected"),
    [
        (["global.index-url='http://u:p@a/s'"], {}, ["http://u:p@a/s"]),
        (["global.index-url='http://a/s'", "global.extra-index-url='http://b/s'"], {}, ["http://a/s", "http://b/s"]),
        (["global.index-url='http://a/s'"], {"UV_DEFAULT_INDEX": "http://own/s"}, ["http://own/s"]),
        (["global.index-url='http://a/s'"], {"UV_INDEX": "team=http://b/s"}, ["http://a/s", "http://b/s"]),
        (["global.no-index='true'", "global.find-links='/a'"], {}, ["/a"]),
        (["global.no-index='true'"], {}, []),
        (["global.index-url='http://a/s'", "global.find-links='/a /b'"], {}, ["http://a/s", "/a", "/b"]),
    ],
)
def test_the_places_that_packages_come_from(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], variables: dict[str, str], expected: list[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    configured(monkeypatch, *lines)
    assert index_config.package_sources() == expected


@pytest.mark.parametrize("line", ["index-url='http://u:secret@[x'", "extra-index-url='http://a http://[x'",
                                  "find-links='/a http://[x'"])  # fmt: skip
def test_an_invalid_url_of_an_index_is_an_error(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Everything that reads an index takes its URL from here."""
    configured(monkeypatch, f"global.{line}")
    with pytest.raises(SettingsError, match=r"the URL of a package index is invalid: http://\[x") as caught:
        index_pages.listed_files("numpy")
    assert "pip config list" in str(caught.value.hint)
    (answer,) = network_reachability_reader.index_answers(time.monotonic() + 1)
    assert answer.fault == caught.value.message


def test_the_default_index_of_pip_is_used_and_not_hard_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    configured(monkeypatch)
    (address,) = index_config.package_sources()
    assert address.startswith("https://")
    host = address.split("/")[2]
    assert not [
        file for file in Path(index_config.__file__).parents[1].rglob("*.py") if host in file.read_text("utf-8")
    ]


def test_uvs_own_file_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "uv.toml"
    file.write_text(
        'find-links = ["/a"]\n[[index]]\nurl = "http://b/s"\ndefault = true\n[[index]]\nurl = "http://c/s"\n'
    )
    monkeypatch.delenv("UV_NO_CONFIG")
    monkeypatch.setenv("UV_CONFIG_FILE", str(file))
    configured(monkeypatch)
    assert index_config.package_sources() == ["http://b/s", "http://c/s", "/a"]
    file.write_text("no toml [")
    assert len(index_config.package_sources()) == 1


def test_pips_real_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://env.example/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "/a /b")
    forget()
    expected = {"UV_DEFAULT_INDEX": "http://env.example/simple", "UV_FIND_LINKS": "/a,/b"}
    assert index_config.uv_environment() == expected


@pytest.mark.parametrize("name", ["UV_DEFAULT_INDEX", "UV_INDEX_URL"])
def test_the_configuration_of_uv_is_kept(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://own.example/simple")
    assert configured(monkeypatch, "global.index-url='http://pip.example/simple'") == {}


def test_folders_of_both_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_FIND_LINKS", "/uv")
    assert configured(monkeypatch, "global.find-links='/pip'") == {"UV_FIND_LINKS": "/uv,/pip"}


def test_a_folder_of_an_unknown_user_has_no_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip ignores it too."""
    monkeypatch.setenv("UV_FIND_LINKS", "~nobody-here/wheels")
    configured(monkeypatch)
    (place,) = index_config.links()
    assert place.endswith("~nobody-here/wheels")
    assert index_pages.listed_at(place, "torch") == ()
    assert uv_config.rooted(place, Path("/f")) == "/f/~nobody-here/wheels"


def test_the_certificate_of_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/own.pem")
    assert configured(monkeypatch, "global.cert='/pip.pem'") == {}


def test_downloads_trust_pips_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    configured(monkeypatch, "global.cert='/pip.pem'")
    assert index_config.index_session().verify == "/pip.pem"


@pytest.mark.parametrize(("header", "seconds"), [("7", 7), ("21600", 60)])
def test_an_index_can_request_a_pause_of_at_most_a_minute(
    monkeypatch: pytest.MonkeyPatch, header: str, seconds: float
) -> None:
    configured(monkeypatch)
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)

    class Busy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if waits else 503)
            self.send_header("Retry-After", header)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    with served(server):
        assert index_config.index_session().get(f"http://127.0.0.1:{server.server_port}/").ok
    assert waits == [seconds]


@pytest.mark.parametrize(
    ("line", "host", "pair"),
    [
        ("index-url='http://me:secret@a.example/simple'", "a.example", ("me", "secret")),
        ("extra-index-url='http://x.example/s http://me:p%40@a.example:81/s'", "a.example:81", ("me", "p@")),
        ("find-links='/f https://token@a.example/x'", "a.example", ("token", "")),
    ],
)
def test_credentials_are_found_by_host(
    monkeypatch: pytest.MonkeyPatch, line: str, host: str, pair: tuple[str, str]
) -> None:
    configured(monkeypatch, f"global.{line}")
    assert index_config.credentials() == {host: pair}


def test_the_best_version_of_all_indexes_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_wheel(tmp_path / "one", "alpha", "1.0")
    write_wheel(tmp_path / "two", "alpha", "2.0")
    write_wheel(tmp_path / "three", "alpha", "1.5")
    quick_pip(monkeypatch)
    with serving(Index(tmp_path / "one")) as one, serving(Index(tmp_path / "two")) as two:
        for extra, best in ((two, one), (one, two)):
            monkeypatch.setenv("PIP_INDEX_URL", best.address)
            monkeypatch.setenv("PIP_EXTRA_INDEX_URL", extra.address)
            monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "three"))
            forget()
            assert wheel_resolution_and_download.resolve_wheels(["alpha"], "3.11", "2.36", {}).versions == {
                "alpha": "2.0"
            }
            assert wheel_resolution_and_download.resolve_wheels(["alpha<2"], "3.11", "2.36", {}).versions == {
                "alpha": "1.5"
            }
