"""A slow reader is named, and the results of readers that finished earlier are kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from envbuild.doctor import (
    cpu_memory_and_os,
    docker_engine_reader,
    machine_reader,
    network_reachability_reader,
    nvml_reader,
)
from envbuild.doctor.machine_readings import Answer, DriverReading, EngineReading
from envbuild.fetch import index_config


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A machine that answers immediately in every part, and an event that never occurs."""
    monkeypatch.setattr(nvml_reader, "read", lambda _: DriverReading())
    monkeypatch.setattr(
        docker_engine_reader, "read", lambda: EngineReading(version="26.1.5", mirrors=("http://slow.example",))
    )
    monkeypatch.setattr(network_reachability_reader, "authorities", lambda: iter(()))
    monkeypatch.setattr(network_reachability_reader, "registries", lambda: ())
    monkeypatch.setattr(network_reachability_reader, "proxies", lambda: ())
    monkeypatch.setattr(network_reachability_reader, "_registry", lambda place: Answer(place, 200))
    monkeypatch.setattr(network_reachability_reader, "_index", lambda place: Answer(place, 200))
    monkeypatch.setattr(index_config, "package_sources", lambda: ["http://slow.example/simple"])
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize(("part", "place"), [("_registry", "mirrors"), ("_index", "indexes")])
def test_a_slow_mirror_is_named_and_not_what_answered_before(
    never: threading.Event, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str, place: str
) -> None:
    monkeypatch.setattr(network_reachability_reader, part, lambda _: never.wait(60))
    monkeypatch.setattr(network_reachability_reader, "PLACE_SECONDS", 60)
    monkeypatch.setattr(machine_reader, "SECONDS", 5.0)
    monkeypatch.setattr(machine_reader, "MARGIN", 4.0)
    found = machine_reader.read(tmp_path)
    assert found.late == ()
    assert found.engine.version == "26.1.5"
    assert found.authorities == ()
    (answer,) = getattr(found, place)
    assert answer.fault == "no answer in time"


def test_the_machine_is_read_once_and_below_its_root(
    never: threading.Event, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    roots: list[Path] = []
    read = cpu_memory_and_os.read

    def counted(root: Path = Path("/")) -> cpu_memory_and_os.Machine:
        roots.append(root)
        return read(root)

    monkeypatch.setattr(cpu_memory_and_os, "read", counted)
    machine_reader.read(tmp_path)
    assert roots == [tmp_path]


def test_a_machine_that_cannot_be_read_is_not_waited_for(
    never: threading.Event, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_memory_and_os, "read", lambda root=Path("/"): never.wait(60))
    monkeypatch.setattr(machine_reader, "SECONDS", 1.0)
    found = machine_reader.read(tmp_path)
    assert "the kernel" in found.late
    assert found.machine == cpu_memory_and_os.unread()


def test_proxies_are_tried_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.setenv(name, f"http://{name.replace('_', '-')}.example:3128")
    met = threading.Barrier(3, timeout=20)

    def connect(*_: object, **__: object) -> None:
        met.wait()
        raise TimeoutError

    monkeypatch.setattr(network_reachability_reader, "PLACE_SECONDS", 20)
    monkeypatch.setattr("socket.create_connection", connect)
    assert [proxy.fault for proxy in network_reachability_reader.proxies()] == [
        "nothing answers there (TimeoutError)"
    ] * 3


def test_a_proxy_whose_name_is_not_found_in_time_fails(never: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("http_proxy", "http://slow.example:3128")
    monkeypatch.setattr(network_reachability_reader, "PLACE_SECONDS", 0.2)
    monkeypatch.setattr(network_reachability_reader, "_silent", lambda _: never.wait(60))
    assert [proxy.fault for proxy in network_reachability_reader.proxies()] == ["no answer in time"]


def test_folders_of_certificates_may_be_several(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(index_config, "certificate", lambda: None)
    monkeypatch.setenv("SSL_CERT_DIR", os.pathsep.join([str(tmp_path), "/nowhere", ""]))
    found = [(item.path, item.fault) for item in network_reachability_reader.authorities()]
    assert found == [(str(tmp_path), None), ("/nowhere", "does not exist")]


def test_the_client_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    client = tmp_path / "docker"
    client.write_text(f"#!/bin/sh\necho asked >>{tmp_path}/asked\necho github.com/docker/buildx 0.13.1 0123456\n")
    client.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert docker_engine_reader._buildx() == {"buildx": "0.13.1"}
    assert (tmp_path / "asked").read_text() == "asked\n"
