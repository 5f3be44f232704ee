"""The Docker Engine's API, simulated on a unix socket: too old, silent, or with unexpected answers. Also how envbuild
chooses the engine."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import socketserver
import sys
import tarfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import docker
import pytest

from envbuild.image import build_records, docker_client_finder
from envbuild.image.docker_engine import Engine
from envbuild.image.engine_endpoint_and_errors import UnusableEngine, endpoint
from envbuild.util.errors import DiskError, EngineError, EnvbuildError
from unit.served import served


class Api:
    """The answers by path, without the version prefix; paths without an answer give 404."""

    def __init__(self, folder: Path, version: str = "26.1.5") -> None:
        self.socket = folder / "docker.sock"
        self.answers: dict[str, tuple[int, Any]] = {
            "/version": (200, {"Version": version, "ApiVersion": "1.45", "Os": "linux", "Arch": "amd64"}),
            "/info": (200, {"DockerRootDir": str(folder), "DriverStatus": []}),
        }
        self.requests: list[str] = []

    @property
    def host(self) -> str:
        return f"unix://{self.socket}"


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@contextlib.contextmanager
def answering(api: Api) -> Iterator[Api]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def handle_any(self) -> None:
            path = self.path.partition("?")[0]
            path = path if path in api.answers else "/" + path.split("/", 2)[-1]
            api.requests.append(f"{self.command} {path}")
            code, content = api.answers.get(path, (404, {"message": f"no such thing: {path}"}))
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(code)
            self.send_header(
                "Content-Type", "application/json" if not isinstance(content, bytes) else "application/x-tar"
            )
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = handle_any

    server = _Server(str(api.socket), Handler)
    with served(server):
        yield api


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    with answering(Api(tmp_path)) as found:
        monkeypatch.setenv("DOCKER_HOST", found.host)
        yield found


def test_the_engine_of_docker_host_is_used(api: Api) -> None:
    found = Engine()
    assert (found.host, found.version, found.platform) == (f"unix://{api.socket}", "26.1.5", "linux/amd64")


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("23.0.0", True),
        ("24.0.9-rc.1", True),
        ("28.1.1+dfsg", True),
        ("100.0", True),
        ("22.9", False),
        ("20.10.24+dfsg1", False),
        ("", False),
        ("dev", False),
    ],
)
def test_an_engine_too_old_is_refused_by_its_version(api: Api, version: str, fits: bool) -> None:
    api.answers["/version"][1]["Version"] = version
    if fits:
        assert Engine().version == version
        return
    with pytest.raises(EngineError, match=r"23\.0 or newer") as caught:
        Engine()
    assert version in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("version", ["4.3.1", "5.4.2", "23.0"])
def test_podman_is_refused_by_its_name_and_with_the_reason(api: Api, version: str) -> None:
    """The answer is that of Debian 12's podman 4.3.1, shortened."""
    parts = [{"Name": "Podman Engine", "Version": version}, {"Name": "Conmon", "Version": "2.1.6"}]
    api.answers["/version"][1].update(Version=version, Components=parts)
    with pytest.raises(EngineError, match=f"is Podman {re.escape(version)}, not a Docker Engine") as caught:
        Engine()
    assert "BuildKit" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"MemoryLimit": True, "PidsLimit": True, "SecurityOptions": ["name=rootless"]}, None),
        ({}, None),
        ({"MemoryLimit": False}, "the engine cannot limit a container's memory$"),
        ({"MemoryLimit": False, "PidsLimit": False, "SecurityOptions": ["name=seccomp", "name=rootless"]},
         "the rootless engine cannot limit a container's memory and processes$"),
    ],
)  # fmt: skip
def test_an_engine_that_ignores_bounds_is_refused(api: Api, info: dict[str, Any], words: str | None) -> None:
    api.answers["/info"][1].update(info)
    if words is None:
        Engine().require_bounds()
        return
    with pytest.raises(EngineError, match=words):
        Engine().require_bounds()


@pytest.mark.parametrize("host", ["unix:///no/such/docker.sock", "tcp://127.0.0.1:9", "garbage://x", "tcp://"])
def test_a_missing_engine_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(EngineError, match="no Docker Engine answers at") as caught:
        Engine()
    assert host in caught.value.message
    assert "Error(" not in caught.value.message and "Error(" not in str(caught.value.hint), "no Python in it"
    assert "DOCKER_HOST" in str(caught.value.hint)
    assert caught.value.code == 6


@pytest.mark.parametrize(
    ("host", "why"),
    [("unix:///no/such/docker.sock", "no such file or directory"), ("tcp://127.0.0.1:9", "connection refused")],
)
def test_an_engine_that_does_not_answer_is_reported_with_the_machines_message(
    monkeypatch: pytest.MonkeyPatch, host: str, why: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(EngineError) as caught:
        Engine()
    assert caught.value.message == f"no Docker Engine answers at {host}: {why}"


def test_certificates_that_are_not_there_are_an_error_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    with pytest.raises(EngineError):
        Engine()


def test_an_engine_that_answers_with_an_error_is_refused(api: Api) -> None:
    api.answers["/version"] = (500, {"message": "broken"})
    with pytest.raises(EngineError):
        Engine()


def context(name: str, host: str) -> None:
    """Write a docker context as `docker context create` and `docker context use` do."""
    folder = Path(os.environ["DOCKER_CONFIG"])
    digest = hashlib.sha256(name.encode()).hexdigest()
    meta = folder / "contexts" / "meta" / digest / "meta.json"
    meta.parent.mkdir(parents=True)
    endpoints = {"docker": {"Host": host, "SkipTLSVerify": False}}
    meta.write_text(json.dumps({"Name": name, "Metadata": {}, "Endpoints": endpoints}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"currentContext": name}), encoding="utf-8")


def test_the_current_context_is_used_where_no_host_is_set(tmp_path: Path) -> None:
    with answering(Api(tmp_path)) as found:
        context("remote", found.host)
        assert Engine().host == found.host


def test_docker_host_comes_before_the_context(api: Api) -> None:
    context("remote", "unix:///no/such.sock")
    assert Engine().host == api.host


def test_a_missing_context_is_reported() -> None:
    folder = Path(os.environ["DOCKER_CONFIG"])
    folder.mkdir()
    (folder / "config.json").write_text('{"currentContext": "gone"}', encoding="utf-8")
    with pytest.raises(UnusableEngine) as caught:
        Engine()
    assert caught.value.message == f"docker context 'gone' (set in {folder}/config.json) does not exist"
    assert caught.value.hint == "docker context ls; then docker context use NAME"


def test_the_context_of_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(Api(tmp_path)) as found:
        context("remote", found.host)
        (Path(os.environ["DOCKER_CONFIG"]) / "config.json").write_text('{"currentContext": "gone"}', encoding="utf-8")
        monkeypatch.setenv("DOCKER_CONTEXT", "remote")
        assert endpoint()[0] == found.host
        monkeypatch.setenv("DOCKER_CONTEXT", "nosuch")
        with pytest.raises(UnusableEngine) as caught:
            Engine()
        assert caught.value.message == "docker context 'nosuch' (set in DOCKER_CONTEXT) does not exist"
        assert "unset DOCKER_CONTEXT" in str(caught.value.hint)


@pytest.mark.parametrize("chosen", ["configuration", "variable"])
@pytest.mark.parametrize(
    "meta",
    ["", "{", "[]", "{}", '{"Name": "x", "Metadata": null, "Endpoints": {}}', '{"Metadata": {}, "Endpoints": []}']
    + [
        f'{{"Name": "x", "Metadata": {{}}, "Endpoints": {{"docker": {end}}}}}'
        for end in ("null", '{"Host": 5}', '{"Host": []}')
    ],
)
def test_an_invalid_context_is_reported(meta: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context("x", "unix:///no/such.sock")
    folder = Path(os.environ["DOCKER_CONFIG"])
    (file,) = folder.rglob("meta.json")
    file.write_text(meta, encoding="utf-8")
    if chosen == "variable":
        monkeypatch.setenv("DOCKER_CONTEXT", "x")
    by = "DOCKER_CONTEXT" if chosen == "variable" else f"{folder}/config.json"
    with pytest.raises(UnusableEngine, match=f"invalid docker context 'x', which {by} names: .") as caught:
        Engine()
    assert "docker context rm" in str(caught.value.hint)


@pytest.mark.parametrize("host", ["tcp://[", "tcp://host:x", "tcp://host:99999"])
@pytest.mark.parametrize("variable", [True, False])
def test_an_invalid_address_of_an_engine_is_reported(
    host: str, variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv("DOCKER_HOST", host)
    else:
        context("x", host)
    with pytest.raises(UnusableEngine, match=f"invalid address of a Docker Engine: {re.escape(host)}: ") as caught:
        Engine()
    assert "DOCKER_HOST or the docker context" in str(caught.value.hint)


@pytest.mark.parametrize(
    "config",
    ["[]", '{"auths": 1}', '{"auths": {"x": {"auth": "a"}}}', '{"auths": {"x": {"auth": "YWJj"}}}'],
)
def test_an_invalid_configuration_is_reported(config: str) -> None:
    folder = Path(os.environ["DOCKER_CONFIG"])
    folder.mkdir()
    (folder / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(UnusableEngine, match=f"invalid configuration of docker in {folder}/config.json: "):
        Engine()


def test_an_invalid_response_of_an_engine_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    monkeypatch.setattr(docker.APIClient, "version", lambda *_, **__: {"ApiVersion": "x"})
    with pytest.raises(UnusableEngine, match=r"invalid response of the Docker Engine at tcp://127\.0\.0\.1:1: .*'x'"):
        Engine()


@pytest.mark.xfail(strict=True, reason="the docker library finds no context without a config.json next to it")
def test_a_context_is_found_without_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`docker context create` alone writes no config.json."""
    context("remote", f"unix://{tmp_path}/socket")
    (Path(os.environ["DOCKER_CONFIG"]) / "config.json").unlink()
    monkeypatch.setenv("DOCKER_CONTEXT", "remote")
    assert endpoint()[0] == f"unix://{tmp_path}/socket"


# requests to the engine

CONFIG = {"Labels": {"a": "b"}, "Env": ["A=1=2", "B="]}
FOUND = {"Id": "sha256:handle", "Config": CONFIG, "RootFS": {"Layers": ["sha256:l"]}, "Size": 5}


def exported(config: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in (("blobs/x", b"x" * 2000), ("manifest.json", json.dumps([{"Config": config}]).encode())):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_an_image_is_found_by_its_configurations_digest_on_the_classic_store(api: Api) -> None:
    api.answers["/images/x:y/json"] = (200, FOUND)
    image = Engine().find("x:y")
    assert image is not None
    assert (image.id, image.handle, image.layers, image.size) == ("sha256:handle", "sha256:handle", ("sha256:l",), 5)
    assert (image.labels, image.environment) == ({"a": "b"}, {"A": "1=2", "B": ""})


@pytest.mark.parametrize("config", ["blobs/sha256/" + "c" * 64, "c" * 64 + ".json"])
def test_an_image_is_found_by_its_configurations_digest_on_the_containerd_store(api: Api, config: str) -> None:
    api.answers["/info"] = (200, {"DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]})
    api.answers["/images/x:y/json"] = (200, FOUND)
    api.answers["/images/sha256:handle/get"] = (200, exported(config))
    image = Engine().find("x:y")
    assert image is not None
    assert (image.id, image.handle) == (f"sha256:{'c' * 64}", "sha256:handle")


def test_the_id_of_a_built_image_on_the_containerd_store_is_that_of_its_record(api: Api) -> None:
    """The image is not exported: that takes long, and the image may be gone by then."""
    api.answers["/info"] = (200, {"DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]})
    api.answers["/images/x:y/json"] = (200, FOUND)
    for handle, image_id in (("sha256:other", "sha256:d"), ("sha256:handle", "sha256:c")):
        build_records.write(build_records.Record(image_id, handle, "lock", handle[7:], (), "envbuild 0"))
    image = Engine().find("x:y")
    assert image is not None
    assert (image.id, image.handle) == ("sha256:c", "sha256:handle")
    assert not [request for request in api.requests if request.endswith("/get")]


@pytest.mark.parametrize("code", [404, 400])
def test_a_missing_image_is_none(api: Api, code: int) -> None:
    api.answers["/images/x/json"] = (
        code,
        {"message": "No such image: x" if code == 404 else "invalid reference format"},
    )
    assert Engine().find("x") is None


def test_a_failure_of_the_engine_is_an_error_of_its_kind(api: Api) -> None:
    api.answers["/images/x/json"] = (500, {"message": "the disk burns"})
    with pytest.raises(EngineError, match="the disk burns"):
        Engine().find("x")


def test_an_engine_whose_disk_is_full_is_an_error_of_the_disk_with_figures(api: Api) -> None:
    api.answers["/images/x/json"] = (500, {"message": "mkdir /var/lib/docker/x: no space left on device"})
    with pytest.raises(DiskError, match=f"Engine's disk is full.*{re.escape(str(api.socket.parent))}.* free"):
        Engine().find("x")


@pytest.mark.parametrize(
    ("info_was_read", "free", "error", "message"),
    [
        (True, 4096, DiskError, "the Docker Engine stopped responding, and its disk is full: {}: 0.0 of 8.0 GB free"),
        (True, 8 << 30, EngineError, "the Docker Engine failed: "),
        (False, 4096, EngineError, "the Docker Engine failed: "),  # it can no longer say where its data is
    ],
)
def test_an_engine_that_went_away_while_its_disk_is_full_is_an_error_of_the_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    info_was_read: bool,
    free: int,
    error: type[EnvbuildError],
    message: str,
) -> None:
    with answering(Api(tmp_path)) as api:
        monkeypatch.setenv("DOCKER_HOST", api.host)
        engine = Engine()
        assert not info_was_read or engine.info
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(8 * 10**9, 0, free))
    with pytest.raises(error) as caught:
        engine.find("x")
    assert caught.value.message.startswith(message.format(tmp_path)) and "again" in str(caught.value.hint)


@pytest.mark.parametrize("code", [200, 404, 409])
def test_removing_images_that_are_gone_or_in_use_is_not_a_fault(api: Api, code: int) -> None:
    api.answers["/images/x"] = (code, [] if code == 200 else {"message": "No such image: x"})
    Engine().remove("x")
    assert api.requests[-1] == "DELETE /images/x"


def test_tags_and_images_are_listed(api: Api) -> None:
    listed = [
        {"Id": "h1", "Size": 1, "RepoTags": ["envbuild/a:1", "envbuild/a:verified", "other:1"]},
        {"Id": "h2", "Size": 2, "RepoTags": None},
        {"Id": "h3", "Size": 3, "RepoTags": ["envbuild/b:1"]},
    ]
    api.answers["/images/json"] = (200, listed)
    api.answers["/containers/json"] = (200, [{"Id": "c", "ImageID": "h3"}])
    found = Engine()
    assert found.images("envbuild/") == [
        ("envbuild/a:1", "h1", 1),
        ("envbuild/a:verified", "h1", 1),
        ("envbuild/b:1", "h3", 3),
    ]
    assert found.used() == {"h3"}
    listed[:] = listed[:1]
    assert found.tags("envbuild/a")["verified"] == "h1"


# the client


def program(folder: Path, code: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "docker"
    file.write_text(f"#!/bin/sh\nexit {code}\n", encoding="utf-8")
    file.chmod(0o755)
    return file


def test_the_first_client_with_buildx_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "without", 1)
    wanted = program(tmp_path / "with", 0)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'without'}:{tmp_path / 'none'}:{tmp_path / 'with'}:/bin")
    assert docker_client_finder.program() == wanted


def test_a_client_that_hangs_is_reported_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = program(tmp_path / "hangs", 0)
    hangs.write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{hangs.parent}:/usr/bin:/bin")
    monkeypatch.setattr("shutil.which", lambda _, path: str(hangs) if path == str(hangs.parent) else None)
    with pytest.raises(EngineError, match="hangs/docker does not answer"):
        docker_client_finder.find_client(0.3)


def test_a_missing_docker_client_is_reported_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(program(tmp_path / "without", 1).parent))
    with pytest.raises(EngineError, match="no docker client with buildx") as caught:
        docker_client_finder.program()
    assert "buildx" in str(caught.value.hint)
