"""Every fault of a host is reported by its own check only, and a host without faults passes all checks.

The command runs in a process of its own, with a driver's library that the tests compile, an engine and an index.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from unit.doctor.bench import NOWHERE, Bench, bench, needs_disk, needs_unshare
from unit.support import CommandResult

pytestmark = pytest.mark.slow

XID = "4,900,12,-;NVRM: Xid (PCI:0000:1a:00): {}, pid=4711, name=python, {}\n"


class Case(NamedTuple):
    """The check `id` has this `status` after `seed` has changed the machine; its detail contains `words`."""

    id: str
    status: str
    words: str
    seed: Callable[[Bench], Any]


def env(**variables: str) -> Callable[[Bench], None]:
    return lambda machine: machine.environment.update(variables)


def cards(*cards: str, driver: str = "550.54.15") -> Callable[[Bench], None]:
    return lambda machine: machine.cards(*cards, driver=driver)


def runtimes(**more: Any) -> Callable[[Bench], None]:
    def seed(machine: Bench) -> None:
        machine.engine.answers["/info"] = (
            200,
            {"DockerRootDir": str(machine.folder), "Runtimes": {"runc": {}}, **more},
        )

    return seed


def log(number: int, words: str) -> Callable[[Bench], None]:
    return lambda machine: machine.put("dev/kmsg", machine.log.read_text() + XID.format(number, words))


def endless_log(machine: Bench) -> None:
    machine.log.unlink()
    machine.log.symlink_to("/dev/zero")


def linked_cache(machine: Bench) -> None:
    (machine.folder / "home").mkdir()
    (machine.folder / "home" / ".cache").symlink_to("/nowhere")


def port(state: str) -> Callable[[Bench], None]:
    def seed(machine: Bench) -> None:
        for name, text in {"state": state, "link_layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)"}.items():
            machine.put(f"sys/class/infiniband/mlx5_0/ports/1/{name}", f"{text}\n")

    return seed


def file(name: str, text: str, variable: str) -> Callable[[Bench], None]:
    def seed(machine: Bench) -> None:
        (machine.folder / name).write_text(text)
        machine.environment[variable] = str(machine.folder / name)

    return seed


def small(path: str) -> Callable[[Bench], None]:
    def seed(machine: Bench) -> None:
        (machine.folder / path).mkdir(parents=True, exist_ok=True)
        machine.small.append(machine.folder / path)

    return seed


def cluster_without_an_engine(machine: Bench) -> None:
    settings("slurm: {registry: registry.example/team, container: pyxis}\n")(machine)
    env(DOCKER_HOST="unix:///nowhere.sock")(machine)


def settings(text: str) -> Callable[[Bench], None]:
    def seed(machine: Bench) -> None:
        file = machine.folder / "config" / "envbuild" / "config.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(text)
        machine.environment["XDG_CONFIG_HOME"] = str(machine.folder / "config")

    return seed


def index(path: str) -> Callable[[Bench], None]:
    return lambda machine: machine.environment.update(PIP_INDEX_URL=f"{machine.index}{path}")


def proxy(address: str) -> Callable[[Bench], None]:
    return env(https_proxy=address, no_proxy="127.0.0.1")


def old_engine(machine: Bench) -> None:
    code, answer = machine.engine.answers["/version"]
    machine.engine.answers["/version"] = (code, {**answer, "Version": "20.10.24"})


H20 = "name=NVIDIA H20"
A100 = "name=NVIDIA A100-SXM4-80GB,total=80,cc=80"

CASES: dict[str, Case] = {
    "no engine": Case("engine", "fail", "no Docker Engine answers", env(DOCKER_HOST="unix:///nowhere.sock")),
    "a cluster instead of an engine": Case("engine", "warn", "--on slurm, the registry", cluster_without_an_engine),
    "old engine": Case("engine", "fail", "20.10.24; 23.0 or newer is needed", old_engine),
    "no buildx": Case("buildx", "fail", "no docker client with buildx", lambda m: m.program("docker", "exit 1")),
    "no GPU runtime": Case("gpu.runtime", "fail", "neither NVIDIA's runtime nor CDI", runtimes()),
    "CDI alone": Case(
        "gpu.runtime", "warn", "only as CDI devices", runtimes(DiscoveredDevices=[{"ID": "nvidia.com/gpu=all"}])
    ),
    "old driver": Case("gpu.driver", "fail", "470.57.02", cards(H20, driver="470.57.02")),
    "driver of another release": Case("gpu.driver", "fail", "version mismatch", env(STUB_NVML="18")),
    "a card that NVML does not have": Case("gpu.answers", "warn", "2 NVIDIA GPUs on the PCI bus", env(STUB_CARDS=H20)),
    "a lost card": Case("gpu.answers", "fail", "GPU 1: GPU is lost", cards(H20, f"{H20},error=15")),
    "a card nobody knows": Case("gpu.models", "warn", "2 x NVIDIA Z9", cards("name=NVIDIA Z9", "name=NVIDIA Z9")),
    "mixed cards": Case("gpu.equal", "warn", "1 x NVIDIA H20, 1 x NVIDIA A100-SXM4-80GB", cards(H20, A100)),
    "unequal memory": Case("gpu.equal", "warn", "1 x 96 GiB, 1 x 141 GiB", cards(H20, f"{H20},total=141")),
    "MIG without instances": Case("gpu.mig", "fail", "GPU 1: MIG is on and has no", cards(H20, f"{H20},mig=1")),
    "MIG": Case("gpu.mig", "warn", "GPU 0: MIG is on, 3 instances", cards(f"{H20},mig=1,slices=3")),
    "MIG after a reset": Case("gpu.mig", "warn", "MIG will be on", cards(f"{H20},mig_pending=1")),
    "ECC errors": Case("gpu.ecc", "fail", "GPU 1: 5 uncorrected memory errors", cards(H20, f"{H20},ecc=5")),
    "a row to be replaced": Case("gpu.ecc", "fail", "waiting to be replaced", cards(f"{H20},pending=1")),
    "a row that was not replaced": Case("gpu.ecc", "fail", "could not be replaced", cards(f"{H20},failed=1")),
    "ECC off": Case("gpu.ecc", "warn", "GPU 0: ECC is off", cards(f"{H20},ecc_on=0")),
    "Xid of the card": Case(
        "gpu.xid", "fail", "0000:1a:00: Xid 79, GPU has fallen off the bus, 1 times", log(79, "GPU has fallen off.")
    ),
    "Xid that nobody knows": Case("gpu.xid", "fail", "Xid 140, 1 times", log(140, "unheard of")),
    "Xid of a program": Case("gpu.xid", "warn", "Xid 31, memory page fault", log(31, "MMU Fault")),
    "a log that is read only in part": Case("gpu.xid", "warn", "was read only in part", endless_log),
    "fabric not joined": Case("gpu.fabric", "fail", "GPU 0: fabric in progress", cards(f"{H20},fabric=2")),
    "fabric failed": Case("gpu.fabric", "fail", "fabric Unknown Error", cards(f"{H20},fabric=3,fabric_status=999")),
    "no fabric manager": Case("gpu.fabric", "fail", "no fabric manager", lambda m: m.put("dev/nvidia-nvswitch0", "")),
    "memory held": Case(
        "gpu.memory", "warn", "GPU 1: 56 GiB of 96 GiB free, used by a process not visible here (pid 4711, 40 GiB)",
        cards(H20, f"{H20},used=40,pid=4711"),
    ),
    "exclusive": Case("gpu.compute-mode", "warn", "GPU 0: exclusive process", cards(f"{H20},mode=3")),
    "prohibited": Case("gpu.compute-mode", "fail", "GPU 0: prohibited", cards(f"{H20},mode=2")),
    "small shm": Case("shm", "warn", "/dev/shm has 0.1 GiB", small("root/dev/shm")),
    "RDMA down": Case("rdma", "warn", "no port is active: mlx5_0/1 DOWN", port("1: DOWN")),
    "disk low": Case("disk", "fail", "building cpu, the smallest, takes", small("home/.cache")),
    "no cache": Case("disk", "fail", "/dev/null", env(XDG_CACHE_HOME="/dev/null")),
    "cache on a missing disk": Case("disk", "fail", "symbolic link to the missing /nowhere", linked_cache),
    "index down": Case("index", "fail", "no answer", env(PIP_INDEX_URL=f"{NOWHERE}/simple")),
    "index refuses": Case("index", "fail", "authentication failed (401)", index("/401/simple")),
    "index mistyped": Case("index", "warn", "not found (404)", index("/404/simple")),
    "index fails": Case("index", "fail", "server error (500)", index("/500/simple")),
    "no such folder": Case("index", "fail", "/nowhere: folder not found", env(PIP_FIND_LINKS="/nowhere")),
    "registry down": Case("registry", "fail", "127.0.0.1:9/v2/: no answer", lambda m: m.login("127.0.0.1:9")),
    "proxy down": Case("proxy", "fail", "http://127.0.0.1:9 (https_proxy)", proxy("http://user:secret@127.0.0.1:9")),
    "proxy is not a valid URL": Case("proxy", "fail", "invalid address", proxy("http://proxy.example:port")),
    "CA missing": Case("ca", "fail", "SSL_CERT_FILE: /nowhere.pem does not exist", env(SSL_CERT_FILE="/nowhere.pem")),
    "CA empty": Case("ca", "fail", "contains no certificate", file("empty.pem", "nothing\n", "CURL_CA_BUNDLE")),
    "clock skewed": Case("clock", "fail", "s ahead of the servers' clocks", index("/late/simple")),
    "settings": Case("settings", "fail", "config.yaml:2: debian_miror: unknown", settings("on: local\ndebian_miror:")),
}  # fmt: skip


def bad(result: CommandResult, id: str = "") -> dict[str, str]:
    """Return the checks that are not ok. This machine's own disk counts only for a case about the disk, because other
    tests fill it."""
    found = {c["id"]: c["state"] for c in result.document["checks"] if c["state"] in ("warn", "fail")}
    return {name: status for name, status in found.items() if name == id or name != "disk"}


def test_an_innocent_host_has_no_fault(tmp_path: Path, libraries: dict[str, str]) -> None:
    needs_disk()
    with bench(tmp_path / "machine", libraries, every_profile=True) as machine:
        result = machine.new_doctor("--json")
    assert bad(result) == {}
    assert result.code == 0, result.stderr
    checks = result.document["checks"]
    assert {c["id"] for c in checks if c["state"] == "skipped"} == {"gpu.fabric", "rdma", "registry"}
    assert {c["id"] for c in checks} == {case.id for case in CASES.values()}, "a check that no case makes fail"


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_named_by_its_check_alone(tmp_path: Path, libraries: dict[str, str], name: str) -> None:
    case = CASES[name]
    with bench(tmp_path / "machine", libraries) as machine:
        case.seed(machine)
        if machine.small:
            needs_unshare()
        # a fault of an index is found with the real pip
        result = machine.new_doctor("--json") if case.id == "index" else machine.doctor("--json")
    assert bad(result, case.id) == {case.id: case.status}, result.stdout + result.stderr
    (check,) = (c for c in result.document["checks"] if c["id"] == case.id)
    assert case.words in check["detail"]
    assert check["remedy"]
    assert result.code == (5 if case.status == "fail" else 0)
    assert ("error" in result.document) == (case.status == "fail")
    assert "secret" not in result.stdout + result.stderr


def test_a_probe_that_hangs_is_named_and_not_waited_for(tmp_path: Path, libraries: dict[str, str]) -> None:
    """For example a driver that hangs, or an engine or index that accepts connections and never answers."""
    with (
        bench(tmp_path / "machine", libraries) as machine,
        socket.create_server(("127.0.0.1", 0), backlog=50) as silent,
    ):
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        machine.environment |= {"STUB_HANGS": "300", "DOCKER_HOST": f"tcp://{address}"}
        machine.environment |= {"PIP_INDEX_URL": f"http://{address}/simple"}
        begin = time.monotonic()
        result = machine.new_doctor("--json")
        assert time.monotonic() - begin < 25  # on an idle machine it takes less than 5 s
    found = {c["id"]: c["detail"] for c in result.document["checks"] if c["state"] == "fail"}
    assert set(found) - {"disk"} == {"gpu.driver", "engine", "index"}
    assert found["gpu.driver"] == "NVML does not answer: the driver hangs"
    assert "no answer" in found["engine"] + found["index"]
