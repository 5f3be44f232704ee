"""dist.nodes: the real probe on two machines, simulated by two processes that meet over loopback."""

import random
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from envbuild.selftest.probes.multi_gpu import dist_nodes
from envbuild.selftest.probes.multi_gpu.dist_nodes import NodeStage, stages
from selftest.reading import Frame, job, outcomes, read, start

pytestmark = pytest.mark.slow

STAGES = 4  # of three machines, each with a port of its own


def free_ports() -> int:
    """Return the first of STAGES free ports in a row. These ports are below the range from which the system gives ports
    to other processes."""
    for first in random.sample(range(20000, 32000, STAGES), 100):
        with ExitStack() as stack:
            try:
                for port in range(first, first + STAGES):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise RuntimeError("no free ports in a row")


def together(folder: Path, *machines: Mapping[str, str], size: int = 2, **fields: object) -> list[Frame]:
    """Run dist.nodes on several machines, and return the report of each. `machines`: environment variables of each
    machine, which override the variables that it needs."""
    meeting = f"127.0.0.1:{free_ports()}"
    document = job(probes=["dist.nodes"], require=["dist.nodes"], threads=1, expect={"nodes": size}, **fields)
    started = []
    for number, more in enumerate(machines):
        place = folder / str(number)
        own = {"ENVBUILD_NODE": str(number), "ENVBUILD_MEETING": meeting, "ENVBUILD_INTERFACE": "lo", **more}
        started.append(start("across", document, place, **own))
    for process in started:
        process.communicate(timeout=300)
    return [outcomes(read((folder / str(number)).read_bytes()))["dist.nodes"] for number in range(len(machines))]


def test_two_machines_work_together(tmp_path: Path) -> None:
    found = together(tmp_path, {}, {})
    assert [frame["status"] for frame in found] == ["passed", "passed"], [frame["reason"] for frame in found]
    for number, frame in enumerate(found):
        assert (frame["traits"]["node"], frame["traits"]["interface"]) == (number, "lo")
        assert [stage["stage"] for stage in frame["traits"]["stages"]] == ["gloo nodes 0+1 x1", "gloo nodes 0+1 x2"]
        cases = {figure["case"] for figure in frame["figures"]}
        assert "gloo nodes 0+1 x2 ddp gradient of weight" in cases and all(f["error"] == 0 for f in frame["figures"])


def test_three_machines_meet_by_twos_and_then_all(tmp_path: Path) -> None:
    found = together(tmp_path, {}, {}, {}, size=3)
    assert [frame["status"] for frame in found] == ["passed"] * 3, [frame["reason"] for frame in found]
    tried = [[stage["stage"] for stage in frame["traits"]["stages"]] for frame in found]
    everyone = ["gloo nodes 0+1+2 x1", "gloo nodes 0+1+2 x2"]
    one, two = "gloo nodes 0+1 x1", "gloo nodes 0+2 x1"
    assert tried == [[one, two, *everyone], [one, *everyone], [two, *everyone]]


def test_early_nodes_wait_for_late_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many nodes, the last one waits while the others try their stages; no node counts as late before its own
    stages have ended."""
    now = 0.0
    ends: dict[int, float] = {}  # port of a stage -> when this machine gives up the stage

    def run(worlds: Any, device: str, limit: float) -> Any:
        nonlocal now
        ends[int(worlds[0].among.meeting.rpartition(":")[2])] = now + limit
        now += 2.0
        return [SimpleNamespace()]

    monkeypatch.setattr(dist_nodes, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(dist_nodes.rank_processes_and_faults, "run_worlds", run)
    monkeypatch.setattr(dist_nodes.dist_staged, "import_ahead", lambda: None)
    monkeypatch.setattr(dist_nodes, "_tell", lambda context, spot, done: done.clear())
    variables = {"ENVBUILD_NODE": "7", "ENVBUILD_MEETING": "127.0.0.1:0", "ENVBUILD_INTERFACE": "lo"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    context: Any = SimpleNamespace(job=SimpleNamespace(nodes=8, device="cpu"), on_cpu=True, step=lambda name: None)
    dist_nodes.dist_nodes(context)
    assert ends == {number: dist_nodes.CAP * (number + 1) for number in (6, 7, 8)}


def test_a_rank_that_dies_is_named_where_it_ran(tmp_path: Path) -> None:
    here, there = together(tmp_path, {}, {"SEED": "dies"})
    assert [here["status"], there["status"]] == ["failed", "failed"]
    assert (there["failure"], there["signal"]) == ("signal", "SIGSEGV") and "broadcast" in there["at"]
    assert here["signal"] is None


@pytest.mark.parametrize("wrong", [{"ENVBUILD_NODE": "2"}, {"ENVBUILD_MEETING": "x"}, {"ENVBUILD_INTERFACE": "a b"}])
def test_a_machine_outside_the_job_does_not_pass(tmp_path: Path, wrong: Mapping[str, str]) -> None:
    (found,) = together(tmp_path, wrong)
    assert found["status"] == "failed" and "invalid position in a job of 2 nodes" in found["reason"]


def test_the_stages_are_known_in_advance() -> None:
    assert stages(2, 1, cuda=False) == [NodeStage("gloo", (0, 1), 1)]
    assert [stage.name for stage in stages(3, 8, cuda=True)] == [
        "nccl nodes 0+1 x1", "gloo nodes 0+1 x1", "nccl nodes 0+2 x1", "gloo nodes 0+2 x1",
        "nccl nodes 0+1+2 x1", "gloo nodes 0+1+2 x1", "nccl nodes 0+1+2 x8", "gloo nodes 0+1+2 x8",
    ]  # fmt: skip
    assert len(stages(64, 8, cuda=True)) <= 2 * 66
