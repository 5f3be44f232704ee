"""env.arch catches code that the driver would have to compile."""

import pytest

pytest.importorskip("torch")

import torch

from envbuild.facts import database, torch_cuda_arch_list_parser
from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.environment import env_arch
from selftest.named import ARCH
from selftest.reading import Frame, job, outcomes, run


def test_the_container_judges_as_the_host_does() -> None:
    """The cases are in tests/unit/facts/test_torch_cuda_arch_list_parser.py."""
    assert env_arch.serves is torch_cuda_arch_list_parser.serves


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Frame]:
    names = ["right", "blackwell", "volta", "ptx", "wrong", "image", "switch", "unasked"]
    document = job(device="cuda", probes=[f"env.arch:{name}" for name in names])
    found = outcomes(run("hardware", document, tmp_path_factory.mktemp("arch") / "frames")[0])
    return {name.partition(":")[2]: {**frame, "probe": "env.arch"} for name, frame in found.items()}


@pytest.mark.slow
def test_a_gpu_with_code_passes(seeds: dict[str, Frame]) -> None:
    assert seeds["right"]["status"] == "passed", seeds["right"]
    assert seeds["right"]["traits"]["compute_capability"] == "8.9"


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        ("blackwell", "torch 2.6.0+cu124 has no code for it (its list: sm_50"),
        ("volta", "TORCH_CUDA_ARCH_LIST=7.0"),
        ("ptx", "has only PTX for it, which the driver would compile"),
        ("wrong", "compute capability 9.0: wrong results of exp"),
        ("image", "exp fails if compilation at run time is disabled: RuntimeError: CUDA error: no kernel image"),
    ],
)
def test_a_missing_architecture_is_named(seeds: dict[str, Frame], seed: str, words: str) -> None:
    result = seeds[seed]
    assert (result["status"], result["failure"]) == ("failed", "mismatch")
    assert words in result["reason"], result["reason"]
    assert [advisory.id for advisory in database.advisories() if advisory.matches(result)] == ARCH.get(seed, [])


def test_a_driver_that_dies_while_it_lists_the_gpus_is_reported(seeds: dict[str, Frame]) -> None:
    result = seeds["unasked"]
    assert (result["status"], result["failure"]) == ("failed", "exception")
    assert result["reason"] == "the GPUs could not be listed: the process died of SIGSEGV"


def test_torch_is_not_imported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process has the parent's modules; a new interpreter would not."""
    imported_state: list[str] = []
    monkeypatch.setattr(env_arch, "missing_gpu", lambda: None)
    monkeypatch.setattr(env_arch, "gpus_by_capability", lambda: {(9, 0): "cpu"})
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    monkeypatch.setattr(
        env_arch, "run_operations", lambda tell, device: tell("wrong", [] if imported_state == ["here"] else ["new"])
    )
    imported_state.append("here")
    for name in ("CUDA_DISABLE_PTX_JIT", "CUDA_CACHE_DISABLE"):
        monkeypatch.setenv(name, "0")
    context = Context(JobDocument("0" * 32, device="cuda"))
    env_arch.env_arch(context)
    assert context.faults == []


def test_the_processes_run_with_the_drivers_compiler_off(seeds: dict[str, Frame]) -> None:
    assert seeds["switch"]["status"] == "passed", seeds["switch"]["reason"]
