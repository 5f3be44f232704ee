"""env.arch: which code serves which card, and that what the driver would have to compile is caught."""

import pytest

pytest.importorskip("torch")

import torch

from envbuild.plan import facts
from envbuild.selftest.context import Context
from envbuild.selftest.job import Job
from envbuild.selftest.probes import arch
from envbuild.selftest.probes.arch import Capability, serves

from .named import ARCH
from .reading import Frame, job, outcomes, run


@pytest.mark.parametrize(
    ("listed", "card", "code"),
    [
        ("sm_50 sm_80 sm_86 sm_90", (8, 0), "compiled"),
        ("sm_50 sm_80 sm_86 sm_90", (8, 9), "compiled"),
        ("sm_86 sm_90", (8, 0), None),
        ("sm_80 sm_90 compute_90", (8, 6), "compiled"),
        ("sm_80 sm_90 compute_90", (10, 0), "ptx"),
        ("sm_80 compute_90", (9, 0), "ptx"),
        ("sm_80 compute_90", (7, 5), None),
        ("sm_90a", (9, 0), "compiled"),
        ("sm_100a", (10, 3), None),
        ("sm_100f", (10, 3), "compiled"),
        ("sm_100", (10, 3), "compiled"),
        ("sm_103", (10, 0), None),
        ("sm_90a compute_90a", (10, 0), None),
        ("sm_120", (12, 1), "compiled"),
        ("gfx90a", (9, 0), None),
        ("", (9, 0), None),
    ],
)
def test_code_serves_a_card(listed: str, card: Capability, code: "str | None") -> None:
    assert serves(listed.split(), card) == code


def test_the_facts_say_the_same_of_every_release_and_card() -> None:
    """Two pieces of code on either side of the container's wall."""
    cards = {gpu.compute_capability for gpu in facts.gpus().values()}
    for release in facts.torch_releases().values():
        listed = ["sm_" + arch.replace(".", "") for arch in release.arch_list]
        listed += ["compute_" + release.arch_list[-1].replace(".", "")] if release.ptx else []
        for card in cards:
            major, _, minor = card.partition(".")
            assert serves(listed, (int(major), int(minor))) == release.kernels(card), (release.version, card)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Frame]:
    names = ["right", "blackwell", "volta", "ptx", "wrong", "image", "switch", "unasked"]
    document = job(device="cuda", probes=[f"env.arch:{name}" for name in names])
    found = outcomes(run("hardware", document, tmp_path_factory.mktemp("arch") / "frames")[0])
    return {name.partition(":")[2]: {**frame, "probe": "env.arch"} for name, frame in found.items()}


def test_a_card_with_code_passes(seeds: dict[str, Frame]) -> None:
    assert seeds["right"]["status"] == "passed", seeds["right"]
    assert seeds["right"]["traits"]["compute_capability"] == "8.9"


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        ("blackwell", "torch 2.6.0+cu124 has no code for it (its list: sm_50"),
        ("volta", "TORCH_CUDA_ARCH_LIST=7.0"),
        ("ptx", "has only PTX for it, which the driver would compile"),
        ("wrong", "compute capability 9.0: wrong results of exp"),
        ("image", "exp fails where nothing may be compiled at run time: RuntimeError: CUDA error: no kernel image"),
    ],
)
def test_what_has_no_code_is_named(seeds: dict[str, Frame], seed: str, words: str) -> None:
    result = seeds[seed]
    assert (result["status"], result["failure"]) == ("failed", "mismatch")
    assert words in result["reason"], result["reason"]
    assert [advisory.id for advisory in facts.advisories() if advisory.matches(result)] == ARCH.get(seed, [])


def test_a_driver_that_dies_when_it_is_asked_for_the_cards_is_told(seeds: dict[str, Frame]) -> None:
    result = seeds["unasked"]
    assert (result["status"], result["failure"]) == ("failed", "exception")
    assert result["reason"] == "the cards cannot be asked: the process died of SIGSEGV"


def test_torch_is_not_imported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process has what this one has: a new interpreter would not."""
    told: list[str] = []
    monkeypatch.setattr(arch, "missing_gpu", lambda: None)
    monkeypatch.setattr(arch, "cards", lambda: {(9, 0): "cpu"})
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    monkeypatch.setattr(arch, "operations", lambda tell, device: tell("wrong", [] if told == ["here"] else ["new"]))
    told.append("here")
    for name in ("CUDA_DISABLE_PTX_JIT", "CUDA_CACHE_DISABLE"):
        monkeypatch.setenv(name, "0")
    context = Context(Job("0" * 32, device="cuda"))
    arch.arch(context)
    assert context.faults == []


def test_the_processes_run_with_the_drivers_compiler_off(seeds: dict[str, Frame]) -> None:
    assert seeds["switch"]["status"] == "passed", seeds["switch"]["reason"]
