"""Context: steps on a device that works asynchronously."""

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context, is_unsupported


@pytest.mark.parametrize(
    ("device", "started", "order"),
    [("cuda", True, ["waits", "mm"]), ("cuda", False, ["mm"]), ("cpu", True, ["mm"])],
)
def test_queued_work_ends_before_the_next_step_is_announced(
    monkeypatch: pytest.MonkeyPatch, device: str, started: bool, order: list[str]
) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("waits"))
    Context(JobDocument("0" * 32, device=device), announce=done.append).step("mm")
    assert done == order


def refusing(error: Exception) -> Context:
    context = Context(JobDocument("0" * 32))
    with context.step("mm", is_unsupported) as step:
        raise error
    assert step.refused
    return context


@pytest.mark.parametrize(
    "words",
    [
        "\"addmm_impl_cpu_\" not implemented for 'Half'",
        "Current CUDA Device does not support bfloat16. Please switch dtype to float16.",
        "cuDNN Frontend error: No valid engine configs for Matmul_MUL_Reduction_SUB_EXP_Reduction_LOG_ADD_DIV_Matmul_",
    ],
)
def test_a_kernel_that_torch_lacks_ends_only_its_step_and_is_reported(words: str) -> None:
    context = refusing(RuntimeError(f"{words}\nmore"))
    assert context.traits == {"unsupported": {"mm": words}}
    assert not context.faults


@pytest.mark.parametrize("error", [RuntimeError("misaligned address"), ValueError("not implemented for"), KeyError()])
def test_other_exceptions_in_a_step_propagate(error: Exception) -> None:
    with pytest.raises(type(error)):
        refusing(error)


def test_a_step_that_may_not_be_refused_is_not() -> None:
    context = Context(JobDocument("0" * 32))
    with pytest.raises(RuntimeError, match="not implemented"), context.step("mm"):
        raise RuntimeError("not implemented for 'Half'")
    assert not context.traits
