"""The results that the self-test excludes are wrong in torch, and no others are excluded."""

import itertools
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import operation_case, pairwise_case_sampling, torch_fault_exclusions
from envbuild.selftest.numerics.operation_case import Case
from envbuild.selftest.numerics.torch_fault_exclusions import KNOWN_FAULTS, KnownFault
from envbuild.selftest.probes.convolution import conv_sampled_cases
from envbuild.selftest.probes.images import (
    image_interpolation_cases,
    image_pooling_and_resize_cases,
    pooling_padding_and_unfold_cases,
)
from envbuild.selftest.probes.operations import scatter_and_gather_cases
from selftest import torch_fork_server
from selftest.reading import environment

(GROUPED, SHORT_VOLUME, SHALLOW, LONG_KERNEL, TILED, TILED_GRADIENT, PADDED, STRIDED, FUSED_SGD, SINGLE_ROW, ONE_COLUMN,
 AVERAGED, POOLED) = KNOWN_FAULTS  # fmt: skip


def grouped_without_a_batch() -> bool:
    """Whether a weight gradient differs from the same gradient in float64."""

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        x = torch.arange(72.0).remainder(5).view(1, 4, 6, 3).to(dtype, memory_format=torch.channels_last)
        w = torch.ones(4, 2, 3, 3, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
        y = F.conv2d(x[0], w, groups=2)
        return torch.autograd.grad(y, w, torch.ones_like(y))[0].double()

    exact = gradient(torch.float64)
    return any(not torch.equal(gradient(dtype), exact) for dtype in (torch.float16, torch.bfloat16))


def padded_outputs() -> bool:
    """Whether a weight gradient over many images is wrong by more than one rounding."""

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        x = torch.ones(301, 1, 5, dtype=dtype)
        w = torch.ones(1, 1, 1, dtype=dtype, requires_grad=True)
        y = F.conv_transpose1d(x, w, output_padding=1, dilation=2)
        return torch.autograd.grad(y, w, torch.ones_like(y))[0].double()

    return float((gradient(torch.bfloat16) / gradient(torch.float64) - 1).abs().max()) > 2.0**-8


SCRIPT = """
import torch
import torch.nn.functional as F

def short_volume(dtype):
    x, w = torch.ones(3, 5, 3, 3, 2, dtype=dtype), torch.ones(5, 57, 7, 5, 1, dtype=dtype, requires_grad=True)
    y = F.conv_transpose3d(x, w, stride=2, padding=(3, 2, 0))
    return torch.autograd.grad(y, w, torch.ones_like(y))[0].double()

def shallow_volume(dtype):
    x, w = torch.ones(2, 5, 4, 4, 4, dtype=dtype), torch.ones(5, 3, 3, 1, 1, dtype=dtype, requires_grad=True)
    y = F.conv_transpose3d(x, w, padding=(2, 0, 0))
    return torch.autograd.grad(y, w, torch.ones_like(y))[0].double()

def strided(dtype):
    x, w = torch.ones(4, 1, 64, 64, dtype=dtype), torch.ones(8, 1, 1, 1, dtype=dtype, requires_grad=True)
    y = F.conv2d(x.to(memory_format=torch.channels_last), w, stride=2)
    return torch.autograd.grad(y, w, torch.ones_like(y))[0].double()

torch.set_num_threads(1)
right = all(torch.equal(GRADIENT(torch.DTYPE), GRADIENT(torch.float64)) for _ in range(20))
print("right" if right else "wrong", flush=True)
"""


def wrong_or_dead(name: str, dtype: str = "float32") -> bool:
    """Whether a function of SCRIPT gives a different result than in float64, or its process dies. The function runs in
    a separate process, because torch reads or writes past the end of a buffer."""
    script = SCRIPT.replace("GRADIENT", name).replace("DTYPE", dtype)
    done = torch_fork_server.run("selftest.torch_fork_server:execute", [script], environment(), timeout=300)
    assert done.returncode <= 0, done.stderr
    return done.returncode < 0 or done.stdout != "right\n"


def tiled_rows() -> bool:
    """Whether a convolution differs from the same convolution in float64."""
    x, w = torch.arange(1024.0).remainder(5).view(1, 8, 128), torch.arange(512.0).remainder(3).view(8, 8, 8)
    exact = F.conv1d(x.double(), w.double())
    return not torch.allclose(F.conv1d(x.bfloat16(), w.bfloat16()).double(), exact, rtol=0.01)


def tiled_gradient() -> bool:
    """Whether the gradient of a transposed convolution differs from the same gradient in float64."""

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        x = torch.ones(1, 8, 121, dtype=dtype, requires_grad=True)
        w = torch.arange(512.0).remainder(3).view(8, 8, 8).to(dtype)
        grad = torch.arange(1024.0).remainder(5).view(1, 8, 128).to(dtype)
        return torch.autograd.grad(F.conv_transpose1d(x, w), x, grad)[0].double()

    return not torch.allclose(gradient(torch.bfloat16), gradient(torch.float64), rtol=0.01)


ENDLESS = """
import torch
torch.conv1d(torch.ones(1, 16, 64, dtype=torch.half), torch.ones(16, 1, 16, dtype=torch.half), groups=16)
"""


def endless() -> bool:
    """Whether a small convolution takes more than 20 s."""
    try:
        done = torch_fork_server.run("selftest.torch_fork_server:execute", [ENDLESS], environment(), timeout=20)
    except subprocess.TimeoutExpired:
        return True
    assert done.returncode == 0, done.stderr
    return False


def averaged_windows() -> bool:
    """Whether a gradient on a GPU differs from the same gradient on the CPU."""

    def gradient(device: str) -> torch.Tensor:
        x = torch.ones(1, 2, 4, 4, device=device).to(memory_format=torch.channels_last).requires_grad_()
        y = F.avg_pool2d(x, 2, 1, 1)
        return torch.autograd.grad(y, x, torch.ones_like(y))[0].cpu()

    return not torch.equal(gradient("cuda"), gradient("cpu"))


def skipped_vectors() -> bool:
    """Whether a step of fused SGD leaves parameters as they are."""
    parameter = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.5, fused=True).step()
    return bool((parameter != 0.5).any())


def refused_product() -> bool:
    """Whether the product of a single row is refused, or wrong."""
    row, factors = torch.tensor([[1.0, 2.0]], dtype=torch.float16), torch.full((1, 2), 3.0, dtype=torch.float16)
    try:
        return torch.index_reduce(row, 1, torch.tensor([0, 1]), factors, "prod").tolist() != [[3.0, 6.0]]
    except RuntimeError:
        return True


def equal_rows() -> bool:
    """Whether a column that is resized differs from the same elements in a row."""
    column = torch.arange(4.0).view(1, 1, 4, 1)
    found = F.interpolate(column, (2, 1), mode="bilinear", antialias=True)
    return not torch.equal(found.mT, F.interpolate(column.mT, (1, 2), mode="bilinear", antialias=True))


REPRODUCTIONS: dict[str, Callable[[], bool]] = {
    AVERAGED.name: averaged_windows,
    FUSED_SGD.name: skipped_vectors,
    GROUPED.name: grouped_without_a_batch,
    LONG_KERNEL.name: endless,
    TILED.name: tiled_rows,
    TILED_GRADIENT.name: tiled_gradient,
    ONE_COLUMN.name: equal_rows,
    PADDED.name: padded_outputs,
    SINGLE_ROW.name: refused_product,
    SHALLOW.name: lambda: wrong_or_dead("shallow_volume", "bfloat16"),
    SHORT_VOLUME.name: lambda: wrong_or_dead("short_volume"),
    STRIDED.name: lambda: wrong_or_dead("strided"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", KNOWN_FAULTS, ids=lambda fault: fault.name)
def test_torch_is_wrong_where_a_result_is_left_out(fault: KnownFault) -> None:
    if fault.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if not REPRODUCTIONS[fault.name]():
        pytest.skip(f"torch {torch.__version__} is right on this processor; once it is on all, remove the row")


POINT = {
    **{name: values[0] for name, values in conv_sampled_cases.SPACE.items()},
    **{name: values[0] for name, values in GROUPED.where.items()},
    "usual": "any", "stride": (1, 1, 1), "dilation": (1, 1, 1), "channels": 2, "turn": 0,
}  # fmt: skip


def results(**changes: object) -> set[str]:
    """Return the names of the compared results, without their layouts."""
    point = {**POINT, **changes}
    case = conv_sampled_cases.case(point, seed=1, device=torch.device("cpu"), tf32=False)
    expected = case.expected()
    assert set(case.run(*case.given)) == set(expected)
    return {name.partition(" (")[0] for name in expected}


def test_one_gradient_is_left_out_in_the_dtype_and_layout_where_it_is_wrong() -> None:
    assert results(groups="one") - results() == {"fp16 gradient of the weights"}
    for change in ({"mode": "gradients"}, {"rank": 1}, {"way": "transposed"}, {"kernel": (1, 1, 1)}):
        assert "fp16 gradient of the weights" in results(**change), change


def test_gradients_of_a_short_volume_are_left_out() -> None:
    point = {**{name: values[0] for name, values in SHORT_VOLUME.where.items() if name != "dtype"}, "mode": "gradients"}
    point["length"] = 9  # not shallower than the kernel
    there = results(**point, groups="one")
    left_out = {f"{dtype} gradient of the {name}" for dtype in ("fp32", "bf16") for name in ("weights", "bias")}
    assert not left_out & there
    assert {"fp32 gradient of the input", "bf16 gradient of the input", "fp16 gradient of the weights"} <= there
    for change in (
        {"way": "plain"},
        {"rank": 2},
        {"kernel": (5, 3, 1)},
        {"stride": (1, 1, 1)},
        {"dilation": (1, 2, 1)},
        {"padding": "one"},
    ):
        assert left_out <= results(**{**point, "groups": "one", "bias": True, **change}), change


def test_a_gradient_of_a_volume_that_is_shallower_than_the_kernel_is_left_out() -> None:
    point = {"way": "transposed", "rank": 3, "kernel": (3, 1, 2), "padding": "uneven", "mode": "gradients", "length": 4}
    left_out = {"bf16 gradient of the weights"}
    there = results(**point)  # the output has depth 2
    assert not left_out & there
    assert {"bf16 gradient of the input", "bf16 gradient of the bias", "fp32 gradient of the weights"} <= there
    for change in ({"way": "plain"}, {"rank": 2}, {"padding": "none"}, {"length": 5}):
        assert left_out <= results(**{**point, **change}), change


def test_a_long_depthwise_kernel_is_left_out_in_float16() -> None:
    point = {"rank": 1, "groups": "sixteen", "channels": 1, "filters": 1, "kernel": (15, 1, 1), "mode": "gradients"}
    assert not any(name.startswith("fp16") for name in results(**point))
    for change in ({"kernel": (14, 1, 1)}, {"groups": "thirty-two"}, {"groups": "one"}, {"filters": 2}):
        assert "fp16 output" in results(**{**point, **change}), change


def test_a_row_of_whole_tiles_is_left_out_in_bfloat16() -> None:
    point = {"rank": 1, "groups": "one", "channels": 4, "filters": 3, "kernel": (16, 1, 1), "mode": "gradients"}
    assert not any(name.startswith("bf16") for name in results(**point))
    for change in ({"kernel": (8, 1, 1)}, {"kernel": (17, 1, 1)}, {"channels": 3}, {"channels": 16}):
        assert "bf16 output" in results(**{**point, **change}), change
    transposed = results(**point, way="transposed")
    assert "bf16 gradient of the input" not in transposed
    assert {"bf16 output", "bf16 gradient of the weights", "fp32 gradient of the input"} <= transposed


def test_a_gradient_is_left_out_where_the_output_padding_reaches_the_stride() -> None:
    point = {"way": "transposed", "rank": 1, "mode": "gradients", "dilation": (3, 1, 2), "stride": (2, 2, 2)}
    halves = {"fp16 gradient of the weights", "bf16 gradient of the weights"}
    there = results(**point, extra=2)
    assert not halves & there and "fp32 gradient of the weights" in there
    for change in ({"extra": 1}, {"extra": 2, "dilation": (1, 1, 1)}):
        assert halves <= results(**{**point, **change}), change


@pytest.mark.parametrize(("dtype", "turn"), [("fp32", 0), ("bf16", 1)])  # the dtype that has the layout of the point
def test_gradients_of_a_strided_1x1_convolution_are_left_out_in_channels_last(dtype: str, turn: int) -> None:
    point = {name: values[0] for name, values in STRIDED.where.items() if name != "dtype"}
    point = {**point, "mode": "gradients", "bias": True, "dilation": (1, 1, 1), "turn": turn}
    left_out = {f"{dtype} gradient of the weights", f"{dtype} gradient of the bias"}
    there = results(**point)
    assert not left_out & there
    assert {f"{dtype} gradient of the input", "fp16 gradient of the weights"} <= there
    for change in (
        {"rank": 1},
        {"rank": 3},
        {"kernel": (3, 3, 3)},
        {"stride": (1, 1, 1)},
        {"groups": "two"},
        {"input": "offset"},
    ):
        assert left_out <= results(**{**point, **change}), change


def test_fused_sgd_of_halves_is_left_out_and_others_are_not() -> None:
    for dtype, implementation in itertools.product((torch.float16, torch.bfloat16), ("loop", "foreach", "fused")):
        at = {"dtype": dtype, "implementation": implementation}
        left_out = torch_fault_exclusions.uncomputed_results("SGD of half precision", "cpu", at)
        assert bool(left_out) == (implementation == "fused")
        assert not torch_fault_exclusions.uncomputed_results("SGD of half precision", "cuda", at)


def test_nothing_is_left_out_on_a_gpu_or_of_other_operations() -> None:
    at = {name: False for fault in KNOWN_FAULTS if fault.operation == "convolution" for name in fault.where}
    at = {**at, **POINT, "dtype": torch.float16}
    assert torch_fault_exclusions.uncomputed_results("convolution", "cpu", at) == {"gradient of the weights"}
    assert not torch_fault_exclusions.uncomputed_results("convolution", "cuda", at)
    assert not torch_fault_exclusions.uncomputed_results("softmax", "cpu", at)


@pytest.mark.parametrize(
    ("operation", "fault", "changes"),
    [
        (
            "resized images",
            AVERAGED,
            ({"function": "max_pool2d"}, {"padding": 0}, {"layout": "contiguous"}, {"layout": "rows apart"}),
        ),
        (
            "pooling",
            POOLED,
            ({"function": "max_pool"}, {"padded": False}, {"layout": "contiguous"}, {"rank": 3}),
        ),
    ],
)
def test_on_a_gpu_the_gradient_of_a_padded_average_in_channels_last_is_left_out(
    operation: str, fault: KnownFault, changes: Sequence[Mapping[str, object]]
) -> None:
    at = {name: values[0] for name, values in fault.where.items()}
    assert torch_fault_exclusions.uncomputed_results(operation, "cuda", at) == {"gradient"}
    assert not torch_fault_exclusions.uncomputed_results(operation, "cpu", at)
    for change in changes:
        assert not torch_fault_exclusions.uncomputed_results(operation, "cuda", {**at, **change}), change


@pytest.mark.parametrize(
    "module", [image_pooling_and_resize_cases, pooling_padding_and_unfold_cases], ids=["resized images", "pooling"]
)
def test_where_it_is_left_out_a_contiguous_copy_has_its_gradient_computed(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = next(one for one in module.OPERATIONS if one.name in ("resized images", "pooling"))
    points = pairwise_case_sampling.sample(operation, 60, seed=1).points
    last = [point for point in points if point["layout"] == "channels last" and "avg" in point["function"]]
    seen: list[bool] = []

    def gradients(
        output: torch.Tensor, inputs: tuple[torch.Tensor, ...], grad: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        seen.extend(x.is_contiguous() for x in inputs)
        return torch.autograd.grad(output, inputs, grad)

    monkeypatch.setattr(module.backward_pass, "gradients", gradients)
    for left_out in (frozenset[str](), frozenset(("gradient",))):
        monkeypatch.setattr(torch_fault_exclusions, "uncomputed_results", lambda *_, found=left_out: found)
        seen.clear()
        for number, point in enumerate(last):
            case = operation.make(point, number)
            assert not any(
                found.wrong for found in operation_case.worst(case.run(*case.given), case.expected()).values()
            )
        assert last and all(seen) == bool(left_out)


def points_of(module: ModuleType, name: str, is_wanted: Callable[[Mapping[str, Any]], bool]) -> Iterator[Case]:
    """Return cases of the operation with this name, at the sampled points that the test asks for."""
    operation = next(one for one in module.OPERATIONS if one.name == name)
    for seed in range(1, 9):
        points = pairwise_case_sampling.sample(operation, 60, seed).points
        yield from (operation.make(point, number) for number, point in enumerate(points) if is_wanted(point))


def is_single_half_row(point: Mapping[str, Any]) -> bool:
    is_single = point["outer"] * point["inner"] == 1 < point["count"]
    return is_single and point["group"] == "index_reduce" and point["dtype"] in (torch.float16, torch.bfloat16)


def is_one_column(point: Mapping[str, Any]) -> bool:
    at = image_interpolation_cases.fault_values(point)
    return bool(torch_fault_exclusions.uncomputed_results("interpolation", "cpu", at))


@pytest.mark.parametrize(
    ("module", "operation", "is_wanted", "fault"),
    [
        (scatter_and_gather_cases, "blocks by index", is_single_half_row, SINGLE_ROW),
        (image_interpolation_cases, "interpolation", is_one_column, ONE_COLUMN),
    ],
    ids=["index_reduce", "interpolation"],
)
def test_the_case_runs_where_the_fault_is_not_and_finds_it_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    operation: str,
    is_wanted: Callable[[Mapping[str, Any]], bool],
    fault: KnownFault,
) -> None:
    """On a GPU nothing is left out. With nothing left out here, the case must fail on this torch."""
    cases = list(points_of(module, operation, is_wanted))
    assert cases
    for case in cases:
        assert not any(found.wrong for found in operation_case.worst(case.run(*case.given), case.expected()).values())
    monkeypatch.setattr(torch_fault_exclusions, "uncomputed_results", lambda *_: frozenset())
    if not REPRODUCTIONS[fault.name]():
        pytest.skip(f"torch {torch.__version__} is right on this processor")
    assert all(map(fails, cases))


def fails(case: Case) -> bool:
    try:
        return any(found.wrong for found in operation_case.worst(case.run(*case.given), case.expected()).values())
    except RuntimeError:
        return True


def test_single_columns_are_left_out_on_the_cpu_and_nothing_next_to_them() -> None:
    at = {"mode": "linear antialias", "to one column": True, "channels innermost": False}
    assert torch_fault_exclusions.uncomputed_results("interpolation", "cpu", at) == {"output"}
    assert not torch_fault_exclusions.uncomputed_results("interpolation", "cuda", at)
    for change in ({"mode": "linear"}, {"to one column": False}, {"channels innermost": True}):
        assert not torch_fault_exclusions.uncomputed_results("interpolation", "cpu", {**at, **change}), change


def test_products_of_single_half_rows_are_left_out_on_the_cpu() -> None:
    at = {"group": "index_reduce", "single row": True, "dtype": torch.float16, "count": 3}
    assert torch_fault_exclusions.uncomputed_results("blocks by index", "cpu", at) == {"prod", "prod of others"}
    assert not torch_fault_exclusions.uncomputed_results("blocks by index", "cuda", at)
    for change in ({"group": "index"}, {"single row": False}, {"dtype": torch.float32}, {"count": 1}):
        assert not torch_fault_exclusions.uncomputed_results("blocks by index", "cpu", {**at, **change}), change
