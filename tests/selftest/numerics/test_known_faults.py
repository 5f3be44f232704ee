"""Results that the self-test leaves out: torch is wrong there, and nothing else is left out."""

import subprocess
import sys
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import known_faults
from envbuild.selftest.numerics.known_faults import KNOWN_FAULTS, KnownFault
from envbuild.selftest.probes.convolution import conv_cases

(GROUPED, SHORT_VOLUME) = KNOWN_FAULTS


def grouped_without_a_batch() -> bool:
    """Whether a gradient of the weights differs from that in float64."""

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        x = torch.arange(72.0).remainder(5).view(1, 4, 6, 3).to(dtype, memory_format=torch.channels_last)
        w = torch.ones(4, 2, 3, 3, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
        y = F.conv2d(x[0], w, groups=2)
        return torch.autograd.grad(y, w, torch.ones_like(y))[0].double()

    exact = gradient(torch.float64)
    return any(not torch.equal(gradient(dtype), exact) for dtype in (torch.float16, torch.bfloat16))


SHORT_VOLUME_SCRIPT = """
import torch
import torch.nn.functional as F

def gradient(dtype):
    x, w = torch.ones(3, 5, 3, 3, 2, dtype=dtype), torch.ones(5, 57, 7, 5, 1, dtype=dtype, requires_grad=True)
    y = F.conv_transpose3d(x, w, stride=2, padding=(3, 2, 0))
    return torch.autograd.grad(y, w, torch.ones_like(y))[0].double()

torch.set_num_threads(1)
print("right" if torch.equal(gradient(torch.float32), gradient(torch.float64)) else "wrong", flush=True)
"""


def short_volume() -> bool:
    """Whether a gradient of the weights differs from that in float64, or the process dies: in a process of its own,
    because torch writes past the end of the gradient."""
    done = subprocess.run(
        [sys.executable, "-c", SHORT_VOLUME_SCRIPT], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode <= 0, done.stderr
    return done.returncode < 0 or done.stdout != "right\n"


REPRODUCTIONS: dict[str, Callable[[], bool]] = {
    GROUPED.name: grouped_without_a_batch,
    SHORT_VOLUME.name: short_volume,
}


@pytest.mark.parametrize("fault", KNOWN_FAULTS, ids=lambda fault: fault.name)
def test_torch_is_wrong_where_a_result_is_left_out(fault: KnownFault) -> None:
    if not REPRODUCTIONS[fault.name]():
        pytest.skip(f"torch {torch.__version__} is right on this processor; once it is on all, remove the row")


POINT = {
    **{name: values[0] for name, values in conv_cases.SPACE.items()},
    **{name: values[0] for name, values in GROUPED.where.items()},
    "usual": "any", "stride": (1, 1, 1), "dilation": (1, 1, 1), "channels": 2, "turn": 0,
}  # fmt: skip


def results(**changes: object) -> set[str]:
    """The names of the results that are compared, without their layouts."""
    point = {**POINT, **changes}
    case = conv_cases.case(point, seed=1, device=torch.device("cpu"), tf32=False)
    expected = case.expected()
    assert set(case.run(*case.given)) == set(expected)
    return {name.partition(" (")[0] for name in expected}


def test_one_gradient_is_left_out_in_the_dtype_and_layout_where_it_is_wrong() -> None:
    assert results(groups="one") - results() == {"fp16 gradient of the weights"}
    for change in ({"mode": "gradients"}, {"rank": 1}, {"way": "transposed"}, {"kernel": (1, 1, 1)}):
        assert "fp16 gradient of the weights" in results(**change), change


def test_one_gradient_of_a_short_volume_is_left_out() -> None:
    point = {**{name: values[0] for name, values in SHORT_VOLUME.where.items() if name != "dtype"}, "mode": "gradients"}
    there = results(**point, groups="one")
    assert "fp32 gradient of the weights" not in there
    assert {"fp32 gradient of the input", "bf16 gradient of the weights", "fp16 gradient of the weights"} <= there
    for change in (
        {"way": "plain"},
        {"rank": 2},
        {"kernel": (5, 3, 1)},
        {"stride": (1, 1, 1)},
        {"dilation": (1, 2, 1)},
        {"padding": "one"},
    ):
        assert "fp32 gradient of the weights" in results(**{**point, "groups": "one", **change}), change


def test_nothing_is_left_out_on_a_gpu_or_of_other_operations() -> None:
    at = {**POINT, "dtype": torch.float16}
    assert known_faults.uncomputed_results("convolution", "cpu", at) == {"gradient of the weights"}
    assert not known_faults.uncomputed_results("convolution", "cuda", at)
    assert not known_faults.uncomputed_results("softmax", "cpu", at)
