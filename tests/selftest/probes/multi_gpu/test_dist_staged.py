"""The stages of dist.staged with scripted ranks: which are run, and which result they give."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

from envbuild.selftest.distributed import rank_processes_and_faults
from envbuild.selftest.distributed.fault_localization import Stage, StageFault
from envbuild.selftest.distributed.nccl_log import NcclLog
from envbuild.selftest.distributed.rank_processes_and_faults import Tried, World
from envbuild.selftest.harness.forked_work import ForkEnding
from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.probes.multi_gpu import dist_staged

H20 = {"name": "NVIDIA H20", "compute_capability": "9.0", "uuid": "GPU-1"}
A100 = {"name": "NVIDIA A100-SXM4-80GB", "compute_capability": "8.0", "uuid": None}
DIES = StageFault(1, 1, "init", "signal", "died of SIGSEGV", "SIGSEGV")
Bad = Callable[[World], StageFault | None]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Context]:
    """Return a function that runs the probe on simulated GPUs. Its parameters: `cards`, the GPUs; `bad`, returns the
    fault of a world, or None; `edges`, how the ranks of a world are connected."""

    def run(
        cards: Sequence[dict[str, Any]], bad: Bad = lambda world: None, edges: tuple[str, ...] = ("p2p",), **job: Any
    ) -> Context:
        def play(worlds: Sequence[World], device: str, limit: float) -> list[Tried]:
            assert (device, limit) == ("cuda", 30.0)
            ending = ForkEnding(reported={"figure all_reduce fp32 1001": ["float32", [1001], 0.0, 0.1]})
            made = []
            for world in worlds:
                fault = bad(world)
                log = NcclLog("2.21.5", edges) if world.backend == "nccl" and len(world.members) > 1 else NcclLog()
                faults = (fault,) if fault else ()
                stage = Stage(world.backend, world.members, world.settings, faults, 0.5, log)
                made.append(Tried(stage, (ending,) * len(world.members)))
            return made

        monkeypatch.setattr(rank_processes_and_faults, "run_worlds", play)
        monkeypatch.setattr(dist_staged, "visible_gpus", lambda context: list(cards))
        context = Context(JobDocument(nonce="0" * 32, device="cuda", **job))
        contexts.append(context)
        dist_staged.dist_staged(context)
        return context

    contexts: list[Context] = []
    run.__dict__["contexts"] = contexts
    return run


def names(context: Context) -> list[str]:
    return [stage["stage"] for stage in context.traits["stages"]]


def test_all_that_passes_over_nccl_is_tried_over_gloo_once(site: Callable[..., Context]) -> None:
    context = site([H20] * 4, gpu_count=4)
    assert names(context) == [
        "nccl 0", "nccl 1", "nccl 2", "nccl 3", "nccl 0+3", "nccl 1+2", "nccl 0+2", "nccl 1+3", "nccl 0+1", "nccl 2+3",
        "nccl 0+1+2+3", "gloo 0+1+2+3",
    ]  # fmt: skip
    assert context.faults == []
    assert len(context.figures) == 12
    assert (context.traits["transports"], context.traits["nccl"]) == (["p2p"], "2.21.5")
    assert (context.traits["card"], context.traits["unequal"]) == ("NVIDIA H20", None)
    assert context.traits["unequal_cards"] == "no"


def test_a_stage_names_the_ranks_that_are_to_blame(site: Callable[..., Context]) -> None:
    context = site([H20] * 2, lambda world: DIES if world.members == (0, 1) and world.backend == "nccl" else None)
    faults_by_stage = {stage["stage"]: stage["faults"] for stage in context.traits["stages"]}
    assert faults_by_stage["nccl 0"] == faults_by_stage["gloo 0+1"] == []
    assert faults_by_stage["nccl 0+1"] == [
        {"rank": 1, "member": 1, "step": "init", "kind": "signal", "reason": "died of SIGSEGV", "signal": "SIGSEGV"}
    ]


def test_a_world_that_fails_is_tried_over_gloo_and_without_each_transport(site: Callable[..., Context]) -> None:
    def hangs(world: World) -> StageFault | None:
        slow = world.backend == "nccl" and len(world.members) > 1 and not world.settings
        return StageFault(0, world.members[0], "all_reduce fp32 1001", "hang", "not done after 30 s") if slow else None

    context = site([H20] * 2, hangs)
    assert names(context)[2:] == [
        "nccl 0+1", "gloo 0+1", "nccl 0+1 NCCL_P2P_DISABLE=1", "nccl 0+1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1",
        "nccl 0+1 NCCL_NVLS_ENABLE=0",
    ]  # fmt: skip
    (fault,) = context.faults
    assert (fault.kind, fault.step) == ("hang", "nccl 0+1: all_reduce fp32 1001, rank 0 (GPU 0)")
    assert "nccl fails and gloo passes" in fault.reason and "it passes with NVLS disabled" in fault.reason
    traits = context.traits
    assert (traits["layer"], traits["place"], traits["workaround"]) == ("nccl", "everywhere", "NCCL_NVLS_ENABLE=0")
    assert traits["failed_step"] == "all_reduce fp32 1001"


def test_four_die_where_one_works_and_the_image_is_not_to_blame(site: Callable[..., Context]) -> None:
    context = site([H20] * 4, lambda world: DIES if world.backend == "nccl" and len(world.members) == 4 else None)
    (fault,) = context.faults
    assert (fault.kind, fault.signal) == ("signal", "SIGSEGV")
    assert fault.step == "nccl 0+1+2+3: init, rank 1 (GPU 1)"
    assert fault.reason.startswith("rank 1 (GPU 1) of nccl 0+1+2+3: died of SIGSEGV; each GPU works alone and in pairs")
    assert "disabling transports does not help" in fault.reason


def test_a_gpu_that_fails_alone_is_left_out_of_the_rest(site: Callable[..., Context]) -> None:
    context = site([H20] * 4, lambda world: DIES if world.members == (2,) else None)
    worlds = [name for name in names(context) if name.startswith("nccl") and "+" in name]
    assert worlds == ["nccl 1+3", "nccl 0+3", "nccl 0+1", "nccl 0+1+3"]
    assert "nccl and gloo both fail: that GPU" in context.faults[0].reason


def test_both_fail(site: Callable[..., Context]) -> None:
    context = site([H20] * 2, lambda world: DIES if len(world.members) == 2 else None)
    assert context.traits["layer"] == "image"
    assert "nccl and gloo both fail: the image, the driver, or the code" in context.faults[0].reason
    assert [fault.step for fault in context.faults] == [
        "nccl 0+1: init, rank 1 (GPU 1)", "gloo 0+1: init, rank 1 (GPU 1)",
    ]  # fmt: skip


def test_unequal_gpus_are_named(site: Callable[..., Context]) -> None:
    context = site([A100, H20])
    assert context.faults == []
    assert "8.0 (GPU 0), 9.0 (GPU 1)" in context.traits["unequal"]
    assert context.traits["unequal_cards"] == "yes"
    assert context.traits["card"] == "NVIDIA A100-SXM4-80GB and NVIDIA H20"


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        (("p2p",), None),
        (("shm",), "nccl 0+1 uses shm, the profile requires p2p"),
        ((), "no transport that its log names"),
    ],
)
def test_a_required_transport(site: Callable[..., Context], edges: tuple[str, ...], words: str | None) -> None:
    context = site([H20] * 2, edges=edges, transport="p2p")
    assert [fault.kind for fault in context.faults] == ["mismatch"] * bool(words)
    assert not words or words in context.faults[0].reason


@pytest.mark.parametrize(
    ("cards", "job", "reason"),
    [
        (1, {"gpu_count": 4}, "1 GPU visible, the profile is for 4 that work together"),
        (2, {"gpu_count": 4}, "2 GPUs visible, the profile is for 4 that work together"),
        (1, {"transport": "p2p"}, "one GPU is visible: no transport between GPUs could be measured"),
    ],
)
def test_fewer_gpus_than_the_profile_is_for_prove_nothing(
    site: Callable[..., Context], cards: int, job: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Skip, match=reason):
        site([H20] * cards, **job)
    (context,) = site.__dict__["contexts"]
    assert context.figures, "what can be tried is tried and reported"


def test_fewer_gpus_that_fail_do_fail(site: Callable[..., Context]) -> None:
    assert site([H20], lambda world: DIES, gpu_count=4).faults


def test_one_gpu_is_enough_for_a_profile_of_one(site: Callable[..., Context]) -> None:
    context = site([H20])
    assert names(context) == ["nccl 0", "gloo 0"]
    assert context.traits["skipped"] == "worlds of two and more: one GPU is visible"


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 16])
def test_every_pair_meets_once_and_nobody_twice_in_a_round(count: int) -> None:
    found = dist_staged.rounds(range(count))
    pairs = [pair for pairs in found for pair in pairs]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for together in found:
        members = [member for pair in together for member in pair]
        assert len(set(members)) == len(members)
    assert len(found) == (count - 1 if count % 2 == 0 else count)


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, []), (2, []), (3, [3]), (4, [4]), (6, [4, 6]), (8, [4, 8]), (16, [4, 8, 16])]
)
def test_worlds_grow(count: int, sizes: list[int]) -> None:
    assert [len(world) for world in dist_staged.growing(range(count))] == sizes
