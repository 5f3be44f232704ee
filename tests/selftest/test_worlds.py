"""dist.staged names NCCL's faults: the ranks' fates are played, everything that is said of them is real."""

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

from envbuild.plan import facts
from envbuild.selftest import ranks
from envbuild.selftest.context import Context
from envbuild.selftest.job import Job
from envbuild.selftest.probes import dist
from envbuild.selftest.topology import Fault, Stage
from envbuild.selftest.transport import Log

from .named import WORLDS, World


def played(world: World, asked: ranks.World) -> ranks.Tried:
    fails = asked.backend == "nccl" and len(asked.members) > 1 and world.cure not in asked.settings
    fault = Fault(0, asked.members[0], world.step, world.failure, f"{world.step} fails")
    log = Log(version=world.nccl if asked.backend == "nccl" else None)
    stage = Stage(asked.backend, asked.members, asked.settings, (fault,) if fails else (), log=log)
    return ranks.Tried(stage, ())


@pytest.mark.parametrize("name", WORLDS)
def test_a_fault_of_nccl_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = WORLDS[name]

    def run(asked: Sequence[ranks.World], device: str, limit: float) -> list[ranks.Tried]:
        return [played(world, item) for item in asked]

    cards = [{"name": world.card, "compute_capability": item} for item in world.capabilities]
    monkeypatch.setattr(ranks, "run", run)
    monkeypatch.setattr(dist, "cards", lambda context: cards)
    context = Context(Job(nonce="0" * 32, device="cuda"))
    dist.staged(context)
    first = context.faults[0]
    result = {"probe": "dist.staged", "failure": first.kind, "signal": first.signal, "traits": context.traits}
    assert [advisory.id for advisory in facts.advisories() if advisory.matches(result)] == [name]
