"""`doctor --for`: yes, or no with every reason; and the recorded description of the machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from envbuild.doctor import machine_checks_and_suitability
from envbuild.doctor.check_result import Check
from envbuild.doctor.profile_hardware_needs import Need
from unit.doctor.bench import NOWHERE, Bench, bench, needs_disk
from unit.support import CommandResult

pytestmark = pytest.mark.slow

H20, H200 = "name=NVIDIA H20", "name=NVIDIA H200,total=141"


@pytest.fixture
def machine(tmp_path: Path, libraries: dict[str, str]) -> Iterator[Bench]:
    with bench(tmp_path / "machine", libraries, every_profile=True) as found:
        yield found


def answer(result: CommandResult) -> str:
    (found,) = (check["detail"] for check in result.document["checks"] if check["id"] == "profile")
    return str(found)


@pytest.mark.parametrize(
    ("cards", "driver", "profile", "words"),
    [
        ([H20], "580.65.06", "h20", "yes: this machine suits h20"),
        ([H20], "550.54.15", "h20-cu12", "yes: this machine suits h20-cu12"),
        ([H20], "550.54.15", "h20", "no: gpu.driver: 550.54.15 (CUDA up to 12.4); too old for h20 (580."),
        ([H20, H200], "580.65.06", "h200", "yes"),
        ([H200], "580.65.06", "h20", "no: it needs NVIDIA H20, and this machine has 1 x NVIDIA H200"),
        ([], "550.54.15", "h20", "no: it needs NVIDIA H20, and this machine has no GPU"),
        ([H200], "550.54.15", "h200", "no: gpu.driver: 550.54.15 (CUDA up to 12.4); too old for h200 (580."),
        ([f"{H20},ecc=5"], "580.65.06", "h20", "no: gpu.ecc: GPU 0: 5 uncorrected memory errors"),
        ([f"{H20},ecc=5"], "550.54.15", "cpu", "yes"),
        ([H20, f"{H20},mig=1,slices=3"], "550.54.15", "h20", "no: it needs whole GPUs, and MIG is on for GPU 1"),
        ([f"{H20},mig=1,slices=3"], "550.54.15", "cpu", "yes"),
    ],
)  # fmt: skip
def test_the_answer_has_its_reason(machine: Bench, cards: list[str], driver: str, profile: str, words: str) -> None:
    if words.startswith("yes"):
        needs_disk()
    machine.cards(*cards, driver=driver)
    result = machine.doctor("--for", profile, "--json")
    assert answer(result).startswith(words), result.stdout
    assert result.code == (0 if words.startswith("yes") else 5)


@pytest.mark.parametrize(
    ("cards", "driver", "profile", "remedy"),
    [
        ([], "550.54.15", "h20", "on the machine with the GPU: envbuild doctor --for h20"),
        ([H200], "580.65.06", "h20", "on the machine with the GPU"),
        ([H200], "550.54.15", "h200", "update the driver"),
        ([f"{H20},mig=1,slices=3"], "550.54.15", "h20", "turn MIG off: nvidia-smi -mig 0"),
        ([H20], "550.54.15", "step-video", "on a machine with 4, or lower gpu_count"),
    ],
)
def test_an_unsuitable_machine_comes_with_a_remedy(
    machine: Bench, cards: list[str], driver: str, profile: str, remedy: str
) -> None:
    machine.cards(*cards, driver=driver)
    result = machine.doctor("--for", profile, "--json")
    (check,) = (check for check in result.document["checks"] if check["id"] == "profile")
    assert check["state"] == "fail" and remedy in check["remedy"]
    assert "tells what it is for" not in check["remedy"]


def test_a_missing_engine_is_reported_once_with_its_remedy(machine: Bench) -> None:
    machine.cards()
    machine.environment["DOCKER_HOST"] = "unix:///no/such.sock"
    result = machine.doctor()
    whole = result.stdout + result.stderr
    assert result.code == 5
    assert whole.count("no Docker Engine answers at unix:///no/such.sock: no such file or directory") == 1
    assert whole.count("start a Docker Engine") == 1
    assert "Error(" not in whole
    printed = machine.doctor("--for", "cpu", "--json").document
    assert "start a Docker Engine" in printed["error"]["hint"], "who reads JSON sees no lines"


def test_probes_skipped_for_one_reason_are_one_line_in_a_terminal(machine: Bench) -> None:
    machine.cards()
    shown, document = machine.doctor().stdout, machine.doctor("--json").document
    skipped = [check for check in document["checks"] if check["detail"] == "NVML reports no GPU"]
    assert len(skipped) > 5 and shown.count("NVML reports no GPU") == 1
    assert re.search(rf"^skipped +gpu\.\* +NVML reports no GPU \({len(skipped)} checks\)$", shown, re.MULTILINE)
    assert re.search(r"^skipped +rdma +no RDMA device$", shown, re.MULTILINE), "a single one keeps its line"


def test_the_network_counts_where_something_is_to_be_fetched(machine: Bench) -> None:
    machine.login("127.0.0.1:9")  # nothing listens there, and no profile pulls from it
    assert answer(machine.doctor("--for", "cpu", "--json")).startswith("yes")
    machine.environment["PIP_INDEX_URL"] = f"{NOWHERE}/simple"
    assert answer(machine.doctor("--for", "cpu", "--json")).startswith("no: index:")


@pytest.mark.parametrize(
    ("need", "counts"),
    [
        (Need("a", (), fetched=0), {"engine"}),
        (Need("a", (), fetched=1), {"engine", "index"}),
        (Need("a", ("h20",), fetched=0), {"engine", "gpu.ecc"}),
        (Need("a", (), fetched=0, pulls=True), {"engine", "index", "registry"}),
    ],
)
def test_the_checks_that_count_for_a_profile(need: Need, counts: set[str]) -> None:
    checks = [Check(id, "fail", "") for id in ("engine", "index", "registry", "gpu.ecc")]
    assert {check.id for check in machine_checks_and_suitability.relevant(need, checks)} == counts


def test_gpus_are_counted(machine: Bench) -> None:
    (machine.folder / "profiles").mkdir()
    (machine.folder / "profiles" / "four.yaml").write_text("extends: h20-cu12\ngpu_count: 4\n")
    result = machine.doctor("--for", "four", "--json")
    assert answer(result).startswith("no: it needs 4 of NVIDIA H20 together, and this machine has 2 x NVIDIA H20")


def test_an_invalid_profile_is_reported_as_in_other_commands(machine: Bench) -> None:
    assert machine.doctor("--for", "nosuch").code == 3


def test_the_description_has_its_shape_and_is_recorded(machine: Bench) -> None:
    machine.put("usr/local/cuda/version.json", '{"cuda": {"name": "CUDA SDK", "version": "12.4.1"}}')
    machine.put("usr/lib/x86_64-linux-gnu/libnccl.so.2.21.5", "")
    result = machine.doctor("--json", "-o", "machine.json")
    assert json.loads((machine.folder / "machine.json").read_text()) == result.document
    found = result.document
    assert found["version"] == 1
    assert found["engine"]["version"] == "26.1.5"
    assert found["engine"]["buildx"] == "0.13.1"
    assert found["engine"]["host"] == machine.engine.host
    assert [(g["name"], g["compute_capability"], g["driver"], g["mig"]) for g in found["gpus"]] == [
        ("NVIDIA H20", "9.0", "550.54.15", False)
    ] * 2
    assert len({g["uuid"] for g in found["gpus"]}) == 2
    assert found["driver"] == {"version": "550.54.15", "cuda": "12.4", "fault": None}
    assert {k: found["software"][k] for k in ("toolkit", "nccl-system")} == {
        "toolkit": "12.4.1",
        "nccl-system": "2.21.5",
    }
    assert set(found["checks"][0]) == {"id", "state", "detail", "remedy", "missing"}


def test_a_failed_check_is_recorded_all_the_same(machine: Bench) -> None:
    machine.cards(f"{H20},failed=1")
    assert machine.doctor("-o", "machine.json").code == 5
    found = json.loads((machine.folder / "machine.json").read_text())
    assert {c["id"] for c in found["checks"] if c["state"] == "fail"} == {"gpu.ecc"}


def test_hostile_words_do_not_reach_the_terminal(machine: Bench) -> None:
    machine.cards("name=NVIDIA \x1b[2J\u202eX")
    machine.put("dev/kmsg", "4,1,1,-;NVRM: Xid (PCI:0000:1a:00): 79, \x1b]0;owned\x07" + "A" * 100_000)
    result = machine.doctor()
    assert "Xid 79" in result.stdout
    assert "\x1b" not in result.stdout + result.stderr
    assert "\u202e" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) < 1000
