"""Results that the self-test leaves out: torch is wrong there, and nothing else is left out."""

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import torch_fault_exclusions
from envbuild.selftest.numerics.torch_fault_exclusions import KNOWN_FAULTS, KnownFault
from envbuild.selftest.probes.convolution import conv_sampled_cases

(GROUPED,) = KNOWN_FAULTS


def grouped_without_a_batch() -> bool:
    """Whether a gradient of the weights differs from that in float64."""

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        x = torch.arange(72.0).remainder(5).view(1, 4, 6, 3).to(dtype, memory_format=torch.channels_last)
        w = torch.ones(4, 2, 3, 3, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
        y = F.conv2d(x[0], w, groups=2)
        return torch.autograd.grad(y, w, torch.ones_like(y))[0].double()

    exact = gradient(torch.float64)
    return any(not torch.equal(gradient(dtype), exact) for dtype in (torch.float16, torch.bfloat16))


REPRODUCTIONS: dict[str, Callable[[], bool]] = {GROUPED.name: grouped_without_a_batch}


@pytest.mark.parametrize("fault", KNOWN_FAULTS, ids=lambda fault: fault.name)
def test_torch_is_wrong_where_a_result_is_left_out(fault: KnownFault) -> None:
    if not REPRODUCTIONS[fault.name]():
        pytest.skip(f"torch {torch.__version__} is right on this processor; once it is on all, remove the row")


POINT = {
    **{name: values[0] for name, values in conv_sampled_cases.SPACE.items()},
    **{name: values[0] for name, values in GROUPED.where.items()},
    "usual": "any", "stride": (1, 1, 1), "dilation": (1, 1, 1), "channels": 2, "turn": 0,
}  # fmt: skip


def results(**changes: object) -> set[str]:
    """The names of the results that are compared, without their layouts."""
    point = {**POINT, **changes}
    case = conv_sampled_cases.case(point, seed=1, device=torch.device("cpu"), tf32=False)
    expected = case.expected()
    assert set(case.run(*case.given)) == set(expected)
    return {name.partition(" (")[0] for name in expected}


def test_one_gradient_is_left_out_in_the_dtype_and_layout_where_it_is_wrong() -> None:
    assert results(groups="one") - results() == {"fp16 gradient of the weights"}
    for change in ({"mode": "gradients"}, {"rank": 1}, {"way": "transposed"}, {"kernel": (1, 1, 1)}):
        assert "fp16 gradient of the weights" in results(**change), change


def test_nothing_is_left_out_on_a_gpu_or_of_other_operations() -> None:
    at = {**POINT, "dtype": torch.float16}
    assert torch_fault_exclusions.uncomputed_results("convolution", "cpu", at) == {"gradient of the weights"}
    assert not torch_fault_exclusions.uncomputed_results("convolution", "cuda", at)
    assert not torch_fault_exclusions.uncomputed_results("softmax", "cpu", at)
