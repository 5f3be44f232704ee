"""Comparison of nodes: the differing one is named, and data from a node is limited, cleaned and never trusted."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from envbuild.doctor import node_comparison, remote_node_reader
from envbuild.doctor.node_comparison import Node
from envbuild.util.errors import FileError, UsageError
from envbuild.util.host_processes import Completed
from unit.doctor.bench import Bench, bench
from unit.support import envbuild
from unit.util.test_host_processes import gone

SAME = {
    "version": 1,
    "host": {"name": "node", "time": "2026-11-21T00:00:00Z"},
    "driver": {"version": "550.54.15", "cuda": "12.4", "fault": None},
    "gpus": [{"name": "NVIDIA H20", "memory_total": 96 << 30, "mig": False, "uuid": "GPU-0"}] * 8,
    "software": {"nccl": "2.21.5", "nccl-system": "2.21.5", "torch": "2.7.1", "toolkit": "12.4.1"},
    "rdma": [{"name": "mlx5_0/1", "state": "ACTIVE", "link": "InfiniBand", "rate": "400 Gb/sec"}],
    "checks": [{"id": "gpu.ecc", "state": "ok", "detail": "none", "remedy": None}],
}


def node(name: str, **changes: Any) -> Node:
    found = node_comparison.parse(name, json.dumps({**SAME, **changes}))
    assert found.fault is None
    return found


def software(**changes: str) -> dict[str, dict[str, str]]:
    return {"software": {**SAME["software"], **changes}}  # type: ignore[dict-item]


def gpus(**changes: Any) -> dict[str, Any]:
    return {"gpus": [{**SAME["gpus"][0], **changes}] * 8}  # type: ignore[index]


DIFFERENCES: dict[str, tuple[dict[str, Any], str, str]] = {
    "same.driver": ({"driver": {"version": "535.104.05", "cuda": "12.4"}}, "fail", "535.104.05"),
    "same.gpus": (gpus(name="NVIDIA H800"), "fail", "8 x NVIDIA H800"),
    "same.memory": (gpus(memory_total=141 << 30), "warn", "8 x 141 GiB"),
    "same.mig": (gpus(mig=True), "warn", "on 8 of 8"),
    "same.nccl": (software(nccl="2.18.1"), "fail", "2.18.1"),
    "same.nccl-system": (software(**{"nccl-system": "2.18.1"}), "warn", "2.18.1"),
    "same.torch": (software(torch="2.3.1"), "fail", "2.3.1"),
    "same.toolkit": (software(toolkit="12.1.0"), "warn", "12.1.0"),
    "same.rdma": ({"rdma": []}, "warn", "none"),
    "node.sound": (
        {"checks": [{"id": "gpu.ecc", "state": "fail", "detail": "5 errors", "remedy": "drain"}]},
        "fail",
        "gpu.ecc: 5 errors",
    ),
}


def bad(found: list[Node]) -> dict[str, str]:
    return {
        check.id: check.status for check in node_comparison.compare_nodes(found) if check.status in ("warn", "fail")
    }


def test_equal_nodes_have_no_difference() -> None:
    found = [node(f"node{index}") for index in range(4)]
    assert bad(found) == {}
    assert {check.status for check in node_comparison.compare_nodes(found)} == {"ok"}
    assert node_comparison.odd(found) == {}


@pytest.mark.parametrize("id", DIFFERENCES)
def test_the_node_that_differs_is_named(id: str) -> None:
    changes, status, words = DIFFERENCES[id]
    found = [node("node0"), node("node1"), node("node2", **changes), node("node3")]
    assert bad(found) == {id: status}
    (check,) = (check for check in node_comparison.compare_nodes(found) if check.id == id)
    assert check.detail.startswith("node2")
    assert words in check.detail
    assert "node1" not in check.detail
    if id != "node.sound":
        assert node_comparison.odd(found) == {"node2": [id]}


def test_a_gpu_may_be_in_any_slot() -> None:
    cards = [{"name": "NVIDIA H20", "memory_total": 96 << 30}, {"name": "NVIDIA H200", "memory_total": 141 << 30}]
    ports = [{"state": state, "link": "InfiniBand", "rate": "400 Gb/sec"} for state in ("ACTIVE", "DOWN")]
    one, other = node("a", gpus=cards, rdma=ports), node("b", gpus=cards[::-1], rdma=ports[::-1])
    assert bad([one, other]) == {}


def test_a_node_that_builds_no_images_is_sound_without_further_remarks() -> None:
    failed = [{"id": id, "state": "fail", "detail": "none"} for id in ("engine", "buildx", "gpu.runtime", "disk")]
    found = [node("a"), node("b", checks=failed)]
    assert bad(found) == {}
    assert "no check that matters for a job failed" in {check.detail for check in node_comparison.compare_nodes(found)}


def test_every_comparison_can_find_a_difference() -> None:
    assert {check.id for check in node_comparison.compare_nodes([node("a")])} == {*DIFFERENCES, "node.answers"}


def test_two_against_two_names_all() -> None:
    older = {"driver": {"version": "535.104.05", "cuda": "12.2"}}
    found = [node("a"), node("b", **older), node("c"), node("d", **older)]
    (check,) = (check for check in node_comparison.compare_nodes(found) if check.id == "same.driver")
    assert check.detail == "no majority: 550.54.15: a, c; 535.104.05: b, d"
    assert set(node_comparison.odd(found)) == {"a", "b", "c", "d"}


def test_a_silent_node_is_named() -> None:
    found = [node("a"), node("b"), Node("c", fault="ssh ended with 255: no route")]
    assert bad(found) == {"node.answers": "fail"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "[" * 200_000,
        '{"version": 2}',
        json.dumps({**SAME, "version": 2}),
        json.dumps({**SAME, "gpus": [{"name": 7}]}),
        json.dumps({**SAME, "gpus": [{"name": "x" * 20_000}]}),
        json.dumps({**SAME, "checks": [{"id": "a", "state": "fine", "detail": ""}]}),
        " " * (node_comparison.MAX_BYTES + 1),
        b"\xff\xfe",
    ],
)  # fmt: skip
def test_an_invalid_description_is_a_fault_of_its_node(text: str | bytes) -> None:
    found = node_comparison.parse("node", text)
    assert found.described is None
    assert found.fault
    assert len(found.fault) < 400


@pytest.mark.parametrize("size", [-1, 1 << 64, 10**400])
def test_memory_that_no_gpu_has_is_a_fault_of_its_node(size: int) -> None:
    found = node_comparison.parse("node", json.dumps({**SAME, **gpus(memory_total=size)}))
    assert found.fault and "memory_total" in found.fault


def test_a_nodes_words_are_cleaned() -> None:
    text = json.dumps({**SAME, "driver": {"version": "\x1b[2J550\u202e", "cuda": None}})
    found = node_comparison.parse("node", text)
    assert found.described is not None
    assert found.described.driver.version == "\N{REPLACEMENT CHARACTER}[2J550\N{REPLACEMENT CHARACTER}"


# how descriptions of nodes are obtained


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hosts: [-oProxyCommand=evil]", "hosts[0]"),
        ("hosts: ['a b']", "hosts[0]"),
        ("hosts: ['a;b', 7]", "hosts[1]"),
        ("hosts: []", "1 to 4096"),
        ("hosts: [a]\nenvbuild: 'x; rm -rf /'", "envbuild"),
        ("hosts: [a]\nenvbuild: -x", "envbuild"),
        ("nodes: [a]", "unknown key"),
        ("- a\n- b", "not a mapping"),
    ],
)
def test_a_file_that_names_no_cluster(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "hosts.yaml"
    file.write_text(text)
    with pytest.raises(FileError) as error:
        remote_node_reader.gather_nodes(str(file))
    assert words in " ".join([error.value.message, *map(str, error.value.faults)])


@pytest.mark.parametrize("source", ["nowhere.yaml", "slurm", "."])
def test_an_invalid_cluster_source_is_reported(project: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    result = envbuild("doctor", "--cluster", source)
    assert result.code == (2 if source == "slurm" else 3)
    assert "hint" in result.stderr


def test_descriptions_gathered_before_are_compared(project: Path) -> None:
    for name in ("a", "b", "c"):
        older = {"driver": {"version": "535.104.05", "cuda": "12.2"}} if name == "c" else {}
        (project / f"{name}.json").write_text(json.dumps({**SAME, **older}))
    result = envbuild("doctor", "--cluster", ".", "--json", "-o", "../cluster.json")
    assert result.code == 5
    assert {n["name"]: n["differences"] for n in result.document["nodes"]} == {
        "a": [],
        "b": [],
        "c": ["same.driver"],
    }
    assert json.loads((project.parent / "cluster.json").read_text())["nodes"] == result.document["nodes"]


def test_a_path_that_is_not_a_file_is_a_fault_of_its_node(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(SAME))
    (tmp_path / "b.json").mkdir()
    os.mkfifo(tmp_path / "c.json")
    (tmp_path / "d.json").symlink_to(tmp_path / "nowhere")
    found = {node.name: node.fault for node in remote_node_reader.gather_nodes(str(tmp_path))}
    assert found == {"a": None, **{name: f"{name}.json is not a file" for name in ("b", "c", "d")}}


def test_a_file_that_may_not_be_read_is_a_fault_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.json").write_text(json.dumps(SAME))
    monkeypatch.setattr(Path, "open", refused)  # instead of permissions, because the tests may run as root
    assert [node.fault for node in remote_node_reader.gather_nodes(str(tmp_path))] == [
        "a.json cannot be read: Permission denied"
    ]


def test_more_nodes_than_are_asked_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_node_reader, "MAX_NODES", 2)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.json").write_text(json.dumps(SAME))
    with pytest.raises(FileError, match="3 JSON files, more than 2"):
        remote_node_reader.gather_nodes(str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[0-2]")
    monkeypatch.setattr(remote_node_reader, "run", lambda *_, **__: Completed(0, "node0 node1 node2\n", ""))
    with pytest.raises(UsageError, match="3 nodes, more than 2"):
        remote_node_reader.gather_nodes("slurm")


def test_an_interruption_ends_what_is_asked_and_asks_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_node_reader, "PARALLEL", 2)
    script = "echo $$ >{0}.new; mv {0}.new {0}; exec sleep 60"
    commands = {str(index): ["sh", "-c", script.format(tmp_path / str(index))] for index in range(4)}
    main = threading.main_thread().ident
    assert main

    def interrupt() -> None:
        while not all((tmp_path / name).exists() for name in ("0", "1")):
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    begin = time.monotonic()
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            remote_node_reader._run(commands)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert time.monotonic() - begin < 30  # of the 40 that a node may take
    assert gone(tmp_path / "0") and gone(tmp_path / "1")
    assert not (tmp_path / "2").exists() and not (tmp_path / "3").exists()


@pytest.fixture
def machine(tmp_path: Path, libraries: dict[str, str]) -> Iterator[Bench]:
    with bench(tmp_path / "machine", libraries) as found:
        found.put("usr/lib64/libnccl.so.2.21.5", "")
        yield found


def _there(machine: Bench) -> str:
    """The commands on the nodes: node3 has an older driver, and node4 does not answer."""
    return (
        "case $* in *node3*) export STUB_DRIVER=535.104.05;; *node4*) echo 'no route' >&2; exit 255;; esac\n"
        f"exec {machine.bin}/python -m envbuild doctor --json --root {machine.root}"
    )


def ssh(machine: Bench) -> list[str]:
    """Nodes that are reached by a stand-in for ssh."""
    machine.program("ssh", _there(machine))
    file = machine.folder / "hosts.yaml"
    file.write_text("hosts: [node0, node1, me@node2, node3, node4]\nenvbuild: /opt/bin/envbuild\n")
    return ["--cluster", str(file)]


def srun(machine: Bench) -> list[str]:
    """The same nodes, reached by stand-ins for Slurm's programs."""
    machine.environment["SLURM_JOB_NODELIST"] = "node[0-4]"
    machine.program("scontrol", 'test "$*" = "show hostnames node[0-4]" && echo node0 node1 node2 node3 node4')
    machine.program("srun", _there(machine))
    return ["--cluster", "slurm"]


@pytest.mark.slow
@pytest.mark.parametrize("through", [ssh, srun])
def test_the_odd_node_is_named_through(machine: Bench, through: Callable[[Bench], list[str]]) -> None:
    result = machine.new_doctor(*through(machine), "--json", root=False)
    assert result.code == 5, result.stderr
    found = {n["name"]: n for n in result.document["nodes"]}
    assert found["node3"]["differences"] == ["same.driver"]
    assert "no route" in found["node4"]["fault"]
    failed = {c["id"]: c["detail"] for c in result.document["checks"] if c["state"] == "fail"}
    assert set(failed) == {"same.driver", "node.answers"}
    assert failed["same.driver"] == "node3 has 535.104.05; the other 3 nodes have 550.54.15"


@pytest.mark.slow
def test_ssh_never_asks_and_takes_no_host_for_an_option(machine: Bench) -> None:
    """The stand-in for ssh only writes how it was started: no node answers."""
    words = ssh(machine)
    machine.program("ssh", f'echo "$*" >> {machine.folder}/asked')
    machine.new_doctor(*words, root=False)
    commands = (machine.folder / "asked").read_text().splitlines()
    assert "-o BatchMode=yes -o ConnectTimeout=10 -T -- me@node2 /opt/bin/envbuild doctor --json" in commands
