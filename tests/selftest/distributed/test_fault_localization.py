"""Which GPUs, links, NCCL or image the failing worlds indicate: each combination gives a specific sentence."""

from collections.abc import Iterable

import pytest

from envbuild.selftest.distributed import fault_localization
from envbuild.selftest.distributed.fault_localization import RETRIES, Stage, StageFault, localize_faults

P2P, SHM, NVLS = RETRIES
FOUR = (0, 1, 2, 3)
ALONE = [(member,) for member in FOUR]
PAIRS = [(a, b) for a in FOUR for b in FOUR if a < b]
SAME = dict.fromkeys(FOUR, "9.0")
FAULT = (StageFault(0, 0, "init", "signal", "died of SIGSEGV", "SIGSEGV"),)


def tried(
    failed: Iterable[tuple[int, ...]], gloo: bool | None = True, helpful: Iterable[tuple[str, ...]] = ()
) -> list[Stage]:
    """Return the stages of four GPUs as the probe tries them: all of gloo's worlds fail or pass. `helpful`: settings
    that avoid the failure."""
    bad = set(failed)
    stages = [Stage("nccl", members, faults=FAULT * (members in bad)) for members in (*ALONE, *PAIRS, FOUR)]
    smallest = [stage.members for stage in stages if stage.faults][:1]
    if gloo is not None:
        stages += [Stage("gloo", members, faults=FAULT * (not gloo)) for members in (*smallest, FOUR)]
    for members in smallest:
        stages += [Stage("nccl", members, settings, FAULT * (settings not in helpful)) for settings in RETRIES]
    return stages


def text(stages: list[Stage]) -> str:
    verdict = localize_faults(stages, SAME)
    assert verdict
    return verdict.text


def test_without_a_failure_there_is_no_verdict() -> None:
    assert localize_faults(tried([]), SAME) is None
    assert localize_faults([Stage("gloo", members) for members in (*ALONE, *PAIRS, FOUR)], {}) is None


@pytest.mark.parametrize(
    ("failed", "place", "words"),
    [
        (ALONE, "everywhere", "each GPU fails even alone"),
        ([(2,)], "card", "GPU 2 fails even alone, the others do not"),
        ([(2,), (3,)], "card", "GPU 2 and GPU 3 fail even alone, the others do not"),
        ([(0, 2)], "link", "only the pair GPU 0 and GPU 2 fails: the link between them, or one of the two"),
        ([(0, 2), FOUR], "link", "only the pair GPU 0 and GPU 2 fails"),
        ([(0, 2), (1, 2), (2, 3)], "card", "every failing pair contains GPU 2: it or its links are faulty"),
        ([(0, 2), (1, 2)], "card", "every failing pair contains GPU 2: it or its links are faulty"),
        ([(0, 2), (1, 3)], "pairs", "only some pairs fail: 0+2, 1+3"),
        ([(0, 1), (0, 2), (1, 2)], "pairs", "only some pairs fail: 0+1, 0+2, 1+2"),
        ([*PAIRS, FOUR], "everywhere", "each GPU works alone, but every pair fails"),
        ([FOUR], "together", "each GPU works alone and in pairs, but 4 together fail: topology, or a limit"),
    ],
)
def test_the_worlds_that_fail_say_where(failed: list[tuple[int, ...]], place: str, words: str) -> None:
    verdict = localize_faults(tried(failed), SAME)
    assert verdict and verdict.place == place
    assert verdict.text.startswith(words), verdict.text


@pytest.mark.parametrize(
    ("failed", "gloo", "layer", "words"),
    [
        ([FOUR], True, "nccl", "nccl fails and gloo passes: NCCL, P2P or topology"),
        (PAIRS, True, "nccl", "nccl fails and gloo passes: NCCL, P2P or topology"),
        (ALONE, True, "nccl", "nccl fails and gloo passes: NCCL itself"),
        ([FOUR], False, "image", "nccl and gloo both fail: the image, the driver, or the code"),
        (ALONE, False, "image", "nccl and gloo both fail: the image, the driver, or the code"),
        ([(2,)], False, "image", "nccl and gloo both fail: that GPU"),
        ([], False, "gloo", "nccl passes and gloo fails: gloo, or the loopback network"),
        ([FOUR], None, "nccl", "nccl fails and gloo was not tried"),
    ],
)
def test_gloo_says_which_layer(failed: list[tuple[int, ...]], gloo: bool | None, layer: str, words: str) -> None:
    verdict = localize_faults(tried(failed, gloo), SAME)
    assert verdict and verdict.layer == layer
    assert words in verdict.text


@pytest.mark.parametrize(
    ("helpful", "workaround", "words"),
    [
        ([P2P], "NCCL_P2P_DISABLE=1", "it passes with P2P disabled"),
        ([P2P, SHM], "NCCL_P2P_DISABLE=1", "it passes with P2P disabled"),
        ([SHM], "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1", "it passes with P2P and SHM disabled"),
        ([NVLS], "NCCL_NVLS_ENABLE=0", "it passes with NVLS disabled"),
        ([NVLS, P2P, SHM], "NCCL_NVLS_ENABLE=0", "it passes with NVLS disabled"),
        ([], None, "disabling transports does not help: NCCL itself, the driver, or a GPU"),
    ],
)
def test_a_helpful_setting_names_the_transport(
    helpful: list[tuple[str, ...]], workaround: str | None, words: str
) -> None:
    verdict = localize_faults(tried([(0, 1), FOUR], helpful=helpful), SAME)
    assert verdict and verdict.workaround == workaround
    assert words in verdict.text


def test_two_gpus_that_do_not_work_together() -> None:
    stages = [Stage("nccl", (0,)), Stage("nccl", (1,)), Stage("nccl", (0, 1), faults=FAULT), Stage("gloo", (0, 1))]
    layer = "nccl fails and gloo passes: NCCL, P2P or topology, not the project's code"
    assert text(stages) == f"each GPU works alone, but every pair fails; {layer}"


def test_one_gpu_that_fails() -> None:
    stages = [Stage("nccl", (0,), faults=FAULT), Stage("gloo", (0,), faults=FAULT)]
    assert text(stages).startswith("the GPU fails even alone; nccl and gloo both fail: the image, the driver")


def test_on_the_cpu_no_gpu_is_blamed() -> None:
    verdict = localize_faults([Stage("gloo", (0,)), Stage("gloo", (1,)), Stage("gloo", (0, 1), faults=FAULT)], {})
    assert verdict and verdict.layer == "image"
    assert verdict.text == "each process works alone, but every pair fails; gloo needs no GPU: the image, or the code"


def test_unequal_gpus_are_named_whether_they_fail_or_not() -> None:
    mixed = {0: "8.0", 1: "9.0", 2: "8.0", 3: "9.0"}
    sentence = "the GPUs differ in compute capability: 8.0 (GPU 0 and GPU 2), 9.0 (GPU 1 and GPU 3)"
    assert fault_localization.inequality(mixed) == sentence
    verdict = localize_faults(tried([FOUR]), mixed)
    assert verdict and verdict.text.endswith(sentence)
    assert fault_localization.inequality(SAME) is None
    assert fault_localization.inequality({}) is None


def test_a_stage_is_named_by_backend_members_and_settings() -> None:
    assert Stage("nccl", (0, 2)).name == "nccl 0+2"
    assert Stage("nccl", (0, 2), SHM).name == "nccl 0+2 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1"
