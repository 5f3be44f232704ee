"""dist.staged names NCCL's faults: the failures of ranks are simulated, their diagnosis is real."""

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

from envbuild.facts import database
from envbuild.selftest.distributed import rank_processes_and_faults
from envbuild.selftest.distributed.fault_localization import Stage, StageFault
from envbuild.selftest.distributed.nccl_log import NcclLog
from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.multi_gpu import dist_staged
from selftest.named import WORLDS, World


def played(world: World, started: rank_processes_and_faults.World) -> rank_processes_and_faults.Tried:
    fails = started.backend == "nccl" and len(started.members) > 1 and world.workaround not in started.settings
    fault = StageFault(0, started.members[0], world.step, world.failure, f"{world.step} fails")
    log = NcclLog(version=world.nccl if started.backend == "nccl" else None)
    stage = Stage(started.backend, started.members, started.settings, (fault,) if fails else (), log=log)
    return rank_processes_and_faults.Tried(stage, ())


@pytest.mark.parametrize("name", WORLDS)
def test_a_fault_of_nccl_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = WORLDS[name]

    def run(
        started: Sequence[rank_processes_and_faults.World], device: str, limit: float
    ) -> list[rank_processes_and_faults.Tried]:
        return [played(world, item) for item in started]

    cards = [{"name": world.card, "compute_capability": item} for item in world.capabilities]
    monkeypatch.setattr(rank_processes_and_faults, "run_worlds", run)
    monkeypatch.setattr(dist_staged, "visible_gpus", lambda context: cards)
    context = Context(JobDocument(nonce="0" * 32, device="cuda"))
    dist_staged.dist_staged(context)
    first = context.faults[0]
    result = {"probe": "dist.staged", "failure": first.kind, "signal": first.signal, "traits": context.traits}
    assert [advisory.id for advisory in database.advisories() if advisory.matches(result)] == [name]
