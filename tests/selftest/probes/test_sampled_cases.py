"""attention.cases and norm.cases: their references, that each input element matters, which wrong kernels are found."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.numerics import backward_pass, layouts_with_nan_gaps, pairwise_case_sampling
from envbuild.selftest.numerics.operation_case import Case, worst
from envbuild.selftest.numerics.pairwise_case_sampling import Operation
from envbuild.selftest.probes.attention import attention_sampled_cases
from envbuild.selftest.probes.normalization import norm_sampled_cases
from selftest.numerics.test_operation_case import any_wrong, changes

Kernel = Callable[..., Any]
SEED, POINTS = 3, {"attention": 20}
OPERATIONS = [*attention_sampled_cases.OPERATIONS, *norm_sampled_cases.OPERATIONS]


def sampled(operation: Operation) -> Iterator[Case]:
    taken = pairwise_case_sampling.sample(operation, POINTS.get(operation.name, 8), SEED)
    return pairwise_case_sampling.cases(operation, taken.points, SEED)


def attempted(case: Case, given: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    try:
        return dict(case.run(*given))
    except NotImplementedError as error:
        pytest.skip(f"refused: {error}")


def ids(case: Case) -> str:
    return f"{case.dtype} {case.name}".removeprefix("torch.")


CASES = [case for operation in OPERATIONS for case in sampled(operation)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_right_kernel_is_within_tolerance_and_each_element_of_its_inputs_matters(case: Case) -> None:
    expected = case.expected()
    right = worst(attempted(case, case.given), expected)
    assert not any(found.wrong for found in right.values()), {name: str(found) for name, found in right.items()}
    for what, given in changes(case):
        assert any_wrong(case.run(*given), expected), f"{what} makes no difference"


@pytest.mark.parametrize("case", [case for case in CASES if "default epsilon" not in case.name], ids=ids)
def test_the_reference_is_what_torch_computes_in_float64(case: Case) -> None:
    got = attempted(case, tuple(values.double() for values in case.given))
    for name, exact in case.expected().items():
        largest = float(exact.value.abs().max())
        assert float((got[name] - exact.value).abs().max()) <= 1e-9 * max(1.0, largest), name


def last_key_left_out(kernel: Kernel) -> Kernel:
    """Ignore the last key if the number of keys is one to three more than a multiple of 16."""

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if not rest and options["attn_mask"] is None and not options["is_causal"] and k.shape[-2] % 16 in (1, 2, 3):
            k, v = k[..., :-1, :], v[..., :-1, :]
        return kernel(q, k, v, *rest, **options)  # type: ignore[no-any-return]

    return wrong


def causal_to_the_end(kernel: Kernel) -> Kernel:
    """A causal mask of unequal lengths lets the last query see the last key."""

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if not rest and options["is_causal"] and q.shape[-2] < k.shape[-2]:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
            options.update(is_causal=False, attn_mask=mask)
        return kernel(q, k, v, *rest, **options)  # type: ignore[no-any-return]

    return wrong


def sees_all(kernel: Kernel) -> Kernel:
    """Give a query that sees no key the mean over all keys."""

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        mask = None if rest else options["attn_mask"]
        if mask is not None and mask.dtype == torch.bool:
            options["attn_mask"] = mask | ~mask.any(-1, keepdim=True)
        return kernel(q, k, v, *rest, **options)  # type: ignore[no-any-return]

    return wrong


def short_head(kernel: Kernel) -> Kernel:
    """Ignore the last element of heads of odd size."""

    def wrong(q: torch.Tensor, k: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if q.shape[-1] % 2:
            options["scale"] = options.get("scale") or q.shape[-1] ** -0.5
            q, k = q[..., :-1], k[..., :-1]
        return kernel(q, k, *rest, **options)  # type: ignore[no-any-return]

    return wrong


def kept_plan(kernel: Kernel) -> Kernel:
    """Reuse the scale of the first call with the same shape."""
    plans: dict[torch.Size, Any] = {}

    def wrong(q: torch.Tensor, *rest: torch.Tensor, **options: Any) -> torch.Tensor:
        return kernel(q, *rest, **{**options, "scale": plans.setdefault(q.shape, options.get("scale"))})

    return wrong


def unscaled_gradient(kernel: Kernel) -> Kernel:
    """Halve the gradient of k."""
    return lambda q, k, v, *rest, **options: kernel(q, (k + k.detach()) / 2, v, *rest, **options)


def kept_epsilon(kernel: Kernel) -> Kernel:
    """Reuse the epsilon of the first call with the same shape."""
    plans: dict[torch.Size, float] = {}
    return lambda x, shape, weight, bias, eps: kernel(x, shape, weight, bias, plans.setdefault(x.shape, eps))


def biased_variance(kernel: Kernel) -> Kernel:
    """Compute the running variance as the sum of squared deviations divided by n, not by n - 1."""

    def wrong(x: torch.Tensor, mean: Any, variance: Any, *rest: Any) -> torch.Tensor:
        before = None if variance is None else variance.clone()
        result: torch.Tensor = kernel(x, mean, variance, *rest)
        training, momentum, n = rest[2], rest[3], x.numel() // x.shape[1]
        if before is not None and training:
            kept = (1 - momentum) * before
            variance.data.copy_(kept + (variance - kept) * (n - 1) / n)
        return result

    return wrong


def channels_in_turns(kernel: Kernel) -> Kernel:
    """Assign channels to groups in turns in channels-last layout."""

    def wrong(x: torch.Tensor, groups: int, *rest: Any) -> torch.Tensor:
        if x.dim() < 4 or x.is_contiguous() or x.stride(1) != 1:
            return kernel(x, groups, *rest)  # type: ignore[no-any-return]
        order = torch.arange(x.shape[1]).view(-1, groups).t().flatten()
        return kernel(x[:, order], groups, *rest)[:, order.argsort()]  # type: ignore[no-any-return]

    return wrong


def padded_width(kernel: Kernel) -> Kernel:
    """Take the mean of squares over a width rounded up to a multiple of 8."""

    def wrong(x: torch.Tensor, shape: Any, *rest: Any) -> torch.Tensor:
        width = torch.Size(shape).numel()
        return kernel(x, shape, *rest) * (-(-width // 8) * 8 / width) ** 0.5  # type: ignore[no-any-return]

    return wrong


ATTENTION, NORMS = attention_sampled_cases.attention_cases, norm_sampled_cases.norm_cases
WRONG = [
    (ATTENTION, "scaled_dot_product_attention", last_key_left_out, "output: element ["),
    (ATTENTION, "scaled_dot_product_attention", causal_to_the_end, ", causal"),
    (ATTENTION, "scaled_dot_product_attention", kept_plan, ", scale "),
    (ATTENTION, "scaled_dot_product_attention", sees_all, "some queries see nothing"),
    (ATTENTION, "scaled_dot_product_attention", short_head, ": output: element ["),
    (ATTENTION, "scaled_dot_product_attention", unscaled_gradient, "gradient of k: element ["),
    (NORMS, "layer_norm", kept_epsilon, "layer_norm of "),
    (NORMS, "batch_norm", biased_variance, "running variance: element ["),
    (NORMS, "group_norm", channels_in_turns, "channels last"),
    (NORMS, "rms_norm", padded_width, "rms_norm of "),
]


@pytest.mark.slow
@pytest.mark.parametrize(("probe", "name", "wrong", "words"), WRONG, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_kernel_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch, probe: Callable[[Context], None], name: str, wrong: Any, words: str
) -> None:
    monkeypatch.setattr(F, name, wrong(getattr(F, name)))
    context = Context(JobDocument("0" * 32, level="quick", seed=SEED))
    probe(context)
    assert context.faults and all(words in fault.reason for fault in context.faults[:1]), context.faults[:1]


@pytest.mark.slow
def test_a_right_kernel_passes_and_says_what_is_covered() -> None:
    for probe, operations in ((ATTENTION, attention_sampled_cases.OPERATIONS), (NORMS, norm_sampled_cases.OPERATIONS)):
        context = Context(JobDocument("0" * 32, level="quick", seed=SEED))
        probe(context)
        assert not context.faults
        assert {operation.name for operation in operations} == set(context.traits["coverage"])


@pytest.mark.parametrize("layout", layouts_with_nan_gaps.LAYOUTS)
def test_a_layout_changes_strides_and_nothing_else(layout: str) -> None:
    values = torch.arange(2 * 3 * 5 * 8.0).view(2, 3, 5, 8)
    found = layouts_with_nan_gaps.with_nan_gaps(values, layout)
    assert torch.equal(found, values)
    assert (found.stride(), found.storage_offset()) != (values.stride(), 0) or layout == "contiguous"


def test_gradients_are_autograds_and_arrive_with_their_strides() -> None:
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    given = torch.arange(6.0).view(3, 2).t()
    (found,) = backward_pass.gradients(x * 3, (x,), given)
    assert torch.equal(found, 3 * given) and found.stride() == given.stride()
    with pytest.raises(ValueError, match="float64 for"):
        backward_pass.gradients(x * 3, (x,), given.double())


def test_seeds_give_other_points() -> None:
    for operation in OPERATIONS:
        first, again, other = (pairwise_case_sampling.sample(operation, 4, seed).points for seed in (1, 1, 2))
        assert first == again != other, dataclasses.asdict(operation)["name"]
