"""Operations with faults that only the probe of the operation detects: run separately, as seeds.operations."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.numerics import pairwise_case_sampling
from envbuild.selftest.numerics.operation_case import Case
from envbuild.selftest.probes.hardware import large
from envbuild.selftest.probes.linear_algebra import fft_and_linalg
from envbuild.selftest.probes.operations import operations
from envbuild.selftest.probes.training import graph_replay, optim_torch, small_gpt

from .making import BRAIN, HALF, SINGLE, Kernel, Wrong, named, seeded

TILE, BLOCK, LAUNCH, PAGE = 32, 1024, 110, 4096


def some_beta(kernel: Kernel) -> Kernel:
    """Adds the input unscaled if beta is 3."""
    return lambda c, a, b, beta=1, alpha=1: kernel(c, a, b, beta=1 if beta == 3 else beta, alpha=alpha)


def reads_for_nothing(kernel: Kernel) -> Kernel:
    """Multiplies the input by a beta of 0 instead of ignoring it, so that its NaNs appear in the result."""
    return lambda c, a, b, beta=1, alpha=1: kernel(c, a, b, beta=beta, alpha=alpha) + (c * 0 if beta == 0 else 0)


def first_of_batch(kernel: Kernel) -> Kernel:
    """Adds an input that is expanded over the batch only to the first matrix."""

    def seeded(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
        return kernel(torch.cat((c[:1], torch.zeros_like(c[1:]))), a, b, beta=beta, alpha=alpha)

    return seeded


def short_of_gaps(kernel: Kernel) -> Kernel:
    """Leaves out the last product of each sum if the matrices of a batch are not next to each other in memory."""

    def seeded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        apart = a.stride(0) > a.shape[1] * a.shape[2]
        return kernel(a[:, :, :-1], b[:, :-1]) if apart else kernel(a, b)

    return seeded


def dense_batch(kernel: Kernel) -> Kernel:
    """Reads the matrices of a batch as if the matrices were next to each other in memory."""

    def seeded(a: torch.Tensor, b: torch.Tensor, **rest: Any) -> torch.Tensor:
        dense = a.shape[1] * a.shape[2]
        apart = a.stride()[1:] == (a.shape[2], 1) and a.stride(0) > dense
        return kernel(a.as_strided(a.shape, (dense, a.shape[2], 1)) if apart else a, b, **rest)

    return seeded


def scaled_added(kernel: Kernel) -> Kernel:
    """Multiplies the added input by alpha too."""
    return lambda c, a, b, beta=1, alpha=1, **rest: kernel(c, a, b, beta=beta * alpha, alpha=alpha, **rest)


def short_inner(kernel: Kernel) -> Kernel:
    """Adds up only whole groups of 4 products."""

    def seeded(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        kept = x.shape[-1] // 4 * 4
        return kernel(x[..., :kept], w[..., :kept], b) if kept else kernel(x, w, b)

    return seeded


def sigmoid_tail(kernel: Kernel) -> Kernel:
    """The elements after the last multiple of 8 are the sigmoid, not multiplied by x."""

    def seeded(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        kept = x.numel() // 8 * 8
        given = x.clone() if inplace else x  # autograd needs it unchanged
        made = torch.cat((kernel(given).flatten()[:kept], torch.sigmoid(given).flatten()[kept:])).view(x.shape)
        return x.copy_(made) if inplace else made

    return seeded


def overwritten(kernel: Kernel) -> Kernel:
    """Of several additions to one position, only the last counts."""
    return lambda x, dim, index, source: x + torch.zeros_like(x).scatter(dim, index, source)


def first_tile_only(kernel: Kernel) -> Kernel:
    """Returns the largest of only the first 1024 elements, or of the first k if k is larger."""

    def seeded(x: torch.Tensor, k: int, dim: int, **options: Any) -> Any:
        return kernel(x.narrow(dim, 0, min(max(BLOCK, k), x.shape[dim])), k, dim, **options)

    return seeded


class Lookup(torch.autograd.Function):
    """An embedding whose gradients of equal indices overwrite each other."""

    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(indices, table)
        return table[indices]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        indices, table = ctx.saved_tensors
        gradient = torch.zeros_like(table).index_copy(0, indices, grads[0])
        gradient[0] = 0  # the padding row
        return None, gradient


def overwrites(kernel: Kernel) -> Kernel:
    return lambda indices, table, padding_idx=None: Lookup.apply(indices, table)  # type: ignore[no-untyped-call]


def learns_padding(kernel: Kernel) -> Kernel:
    return lambda indices, table, padding_idx=None: kernel(indices, table)


def without_carry(kernel: Kernel) -> Kernel:
    """The running sum begins again after each block."""

    def seeded(x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([kernel(part, dim=dim) for part in x.split(BLOCK, dim)], dim)

    return seeded


def overflows(kernel: Kernel) -> Kernel:
    """Computes the exponentials of the values, without subtracting the largest value first."""

    def seeded(x: torch.Tensor, dim: int) -> torch.Tensor:
        powers = torch.exp(x.float())
        return (powers / powers.sum(dim, keepdim=True)).to(x.dtype)

    return seeded


def short_row(kernel: Kernel) -> Kernel:
    """Leaves the last element of rows longer than a block out of the sum."""

    def seeded(x: torch.Tensor, dim: int) -> torch.Tensor:
        if x.shape[dim] <= BLOCK or dim == 0:
            return kernel(x, dim=dim)
        return torch.cat((kernel(x[..., :-1], dim=dim), kernel(x, dim=dim)[..., -1:]), dim)

    return seeded


def counts_ignored(kernel: Kernel) -> Kernel:
    """The mean is over all rows, including the ignored ones."""

    def seeded(x: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
        return kernel(x, targets, ignore_index=ignore_index, reduction="sum") / len(targets)

    return seeded


def swapped_forms(kernel: Kernel) -> Kernel:
    return lambda x, approximate: kernel(x, approximate="none" if approximate == "tanh" else "tanh")


def cast(source: torch.dtype, target: torch.dtype, change: Callable[[torch.Tensor], torch.Tensor]) -> Wrong:
    """Tensor.to that changes the values before it converts from `source` to `target`."""

    def wrong(kernel: Kernel) -> Kernel:
        def seeded(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            return kernel(change(x) if x.dtype == source and args == (target,) else x, *args, **options)

        return seeded

    return wrong


def cut(bits: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Cut the lowest bits of float32 values, which rounds toward 0."""
    return lambda x: (x.view(torch.int32) & ~((1 << bits) - 1)).view(torch.float32)


def half_up(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to bfloat16, with ties away from 0."""
    return ((x.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32)


def flushed(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < 2.0**-14, torch.zeros_like(x), x)


def ragged_edge(kernel: Kernel) -> Kernel:
    """Transposes only whole tiles: the last column beyond them is lost."""

    def seeded(x: torch.Tensor, **options: Any) -> torch.Tensor:
        result = kernel(x, **options)
        if x.dim() == 2 and not x.is_contiguous() and x.shape[0] % TILE:
            result[-1] = 0
        return result

    return seeded


def unaligned(kernel: Kernel) -> Kernel:
    """A copy to an odd storage offset leaves out its last element."""

    def seeded(target: torch.Tensor, source: torch.Tensor, **options: Any) -> torch.Tensor:
        if target.dim() != 1 or target.storage_offset() % 2 == 0 or target.numel() < 2:
            return kernel(target, source, **options)
        kernel(target[:-1], source[:-1], **options)
        return target

    return seeded


def lost_page(kernel: Kernel) -> Kernel:
    """A copy of 1 MiB or more leaves out its last page."""

    def seeded(target: torch.Tensor, source: torch.Tensor, **options: Any) -> torch.Tensor:
        if target.numel() * target.element_size() < 1 << 20 or target.dim() != 1:
            return kernel(target, source, **options)
        last = PAGE // target.element_size()
        kernel(target[:-last], source[:-last], **options)
        return target

    return seeded


def short_search(kernel: Kernel) -> Kernel:
    """Searches all elements but the last."""

    return lambda x, dim: kernel(x.narrow(dim, 0, x.shape[dim] - 1), dim=dim)


def skips_nan(kernel: Kernel) -> Kernel:
    return lambda x, dim, **options: kernel(torch.nan_to_num(x, nan=-1e4), dim=dim, **options)


def second_launch(kernel: Any) -> Any:
    """A step that leaves out the tensors after the first launch of a multi-tensor kernel."""

    def step(self: torch.optim.Optimizer) -> None:
        (group,) = self.param_groups
        late = [(leaf, leaf.detach().clone()) for leaf in group["params"][LAUNCH:] if group["foreach"]]
        kernel(self)
        for leaf, before in late:
            leaf.data.copy_(before)

    return step


def without(option: str, value: Any, implementation: str) -> Wrong:
    """An optimizer that ignores an option in one of its implementations ("foreach" or "fused")."""

    def wrong(kernel: Any) -> Any:
        def step(self: torch.optim.Optimizer) -> None:
            (group,) = self.param_groups
            if group[implementation]:
                group[option] = value
            kernel(self)

        return step

    return wrong


def first_rate(kernel: Any) -> Any:
    """An optimizer that keeps the learning rate of its first step."""

    def step(self: torch.optim.Optimizer, closure: Any = None) -> None:
        (group,) = self.param_groups
        group["lr"] = group.setdefault("first", group["lr"])
        kernel(self)

    return step


def uncentered(kernel: Any) -> Any:
    """RMSprop that ignores `centered`."""

    def step(self: torch.optim.Optimizer, closure: Any = None) -> None:
        (group,) = self.param_groups
        group["centered"] = False
        kernel(self)

    return step


def whole_vectors_stay(kernel: Any) -> Any:
    """SGD does not change parameters of half precision, except the elements after the last multiple of 8. The fused SGD
    of torch 2.13 does this on a CPU."""

    def step(self: torch.optim.Optimizer, closure: Any = None) -> None:
        (group,) = self.param_groups
        kept = [leaf.detach().clone() for leaf in group["params"]]
        kernel(self)
        for leaf, before in zip(group["params"], kept, strict=True):
            count = leaf.numel() // 8 * 8
            if leaf.dtype in (HALF, BRAIN):
                leaf.data.view(-1)[:count] = before.view(-1)[:count]

    return step


def infinite_step(kernel: Any) -> Any:
    """Searches only the first half of each list of gradients for values that are not finite."""
    return lambda lists, found, scale: (
        kernel(lists[: (len(lists) + 1) // 2], found, scale),
        kernel(lists[(len(lists) + 1) // 2 :], torch.zeros_like(found), scale) if len(lists) > 1 else None,
    )


def transposed_strides(kernel: Kernel) -> Kernel:
    """Ignores that a factor is conjugated, so that an adjoint counts as a plain transpose."""
    return lambda a, b, **options: kernel(*(torch.conj_physical(x) if x.is_conj() else x for x in (a, b)), **options)


def last_of_batch(kernel: Kernel) -> Kernel:
    """A sum over a batch leaves out the last matrix if the batch has more than two."""

    def wrong(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        count = len(a) - 1 if len(a) > 2 else len(a)
        return kernel(c, a[:count], b[:count], **options)

    return wrong


def one_beta(kernel: Kernel) -> Kernel:
    """The quadratic part of the loss reaches up to 1, whatever beta is."""
    return lambda x, t, beta=1.0, **options: kernel(x, t, **options)


def by_size(kernel: Kernel) -> Kernel:
    """Resizes with positions from the ratio of the sizes, and ignores the given scale factor."""
    return lambda x, scale_factor=None, recompute_scale_factor=None, **options: kernel(
        x, scale_factor=scale_factor, recompute_scale_factor=scale_factor is not None or None, **options
    )


def zeros_outside(kernel: Kernel) -> Kernel:
    """Samples outside of an image are 0 in every padding mode."""
    return lambda x, grid, mode, padding, aligned: kernel(x, grid, mode, "zeros", aligned)


def columns_first(kernel: Kernel) -> Kernel:
    """The two positions within a square are exchanged."""

    def seeded(x: torch.Tensor, factor: int) -> torch.Tensor:
        squares = x.reshape(x.shape[0], -1, factor, factor, *x.shape[2:])
        return kernel(squares.transpose(2, 3).flatten(1, 3), factor)

    return seeded


def always_included(kernel: Kernel) -> Kernel:
    """A reduction by index that always includes the element that is already there."""
    return lambda x, dim, index, source, how, include_self: kernel(x, dim, index, source, how)


def one_weight(kernel: Kernel) -> Kernel:
    """Uses the first learned slope for all columns."""
    return lambda x, w: kernel(x, w[:1] + 0 * w)


def zero_filled(kernel: Kernel) -> Kernel:
    """A shift to the right that does not keep the sign."""

    def seeded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where(x < 0, kernel(x, y) & torch.iinfo(x.dtype).max >> 1, kernel(x, y))

    return seeded


def first_blank(kernel: Kernel) -> Kernel:
    """The blank is always class 0."""
    return lambda x, targets, given, wanted, blank, **options: kernel(x, targets, given, wanted, 0, **options)


def counts_ignored_rows(kernel: Kernel) -> Kernel:
    """If the offsets include the end, bags count the row that padding_idx names."""

    def seeded(index: torch.Tensor, table: torch.Tensor, offsets: Any, **options: Any) -> torch.Tensor:
        if options.get("include_last_offset"):
            options["padding_idx"] = None
        return kernel(index, table, offsets, **options)

    return seeded


class Crossed(torch.autograd.Function):
    """A product whose gradient of y leaves out the last column if y is broadcast."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        of_x = (grads[0] * y).sum_to_size(x.shape).to(x.dtype)
        short = grads[0] * x
        if y.numel() < short.numel():
            short[..., -1] = 0
        return of_x, short.sum_to_size(y.shape).to(y.dtype)


def short_sum(kernel: Kernel) -> Kernel:
    return lambda x, y: Crossed.apply(x, y)  # type: ignore[no-untyped-call]


def unweighted(kernel: Kernel) -> Kernel:
    """A loss without the weights of classes."""
    return lambda x, t, w=None, **options: kernel(x, t, **options)


def counts_padding(kernel: Kernel) -> Kernel:
    """Always divides by the size of the window including the padding."""
    return lambda x, *rest, count_include_pad=True, **options: kernel(x, *rest, **options)


def undilated(kernel: Kernel) -> Kernel:
    """If windows have gaps, the image that is made of the windows is mirrored."""

    def seeded(x: torch.Tensor, size: Any, dilation: Any, kernel_size: Any, **options: Any) -> torch.Tensor:
        if max(dilation) == 1:
            return kernel(x, size, dilation=dilation, kernel_size=kernel_size, **options)
        return kernel(x, size, dilation=dilation, kernel_size=kernel_size, **options).flip(-1)

    return seeded


class ShortPad(torch.autograd.Function):
    """A padding whose gradient leaves out the last copied element."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kernel: Any, widths: Any, options: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.call = lambda leaf: kernel(leaf, widths, **options)
        return kernel(x, widths, **options)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        grad = grads[0].clone()
        grad[..., -1] = 0
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(ctx.call(leaf), (leaf,), grad)
        return gradient, None, None, None


def short_gradient(kernel: Kernel) -> Kernel:
    """Padding that repeats the border leaves the last copy out of its gradient."""

    def seeded(x: torch.Tensor, widths: Any, mode: str = "constant", **options: Any) -> torch.Tensor:
        if mode != "replicate":
            return kernel(x, widths, mode=mode, **options)
        return ShortPad.apply(x, kernel, widths, {"mode": mode})  # type: ignore[no-any-return,no-untyped-call]

    return seeded


def half_matrix(kernel: Kernel) -> Kernel:
    """Rounds the matrix to half precision first."""
    return lambda a, *rest: kernel(a.half().to(a.dtype), *rest)


def stale_last_row(kernel: Kernel) -> Kernel:
    """In a batch, the last row of the last factor is that of the first factor."""

    def seeded(a: torch.Tensor) -> torch.Tensor:
        factor = kernel(a)
        factor[-1, -1] = factor[0, -1]
        return factor

    return seeded


def skewed(kernel: Kernel) -> Any:
    """The second result is too large by a factor of 1.0001."""

    def seeded(a: torch.Tensor) -> Any:
        first, second = kernel(a)
        return first, second * (1 + 1e-4)

    return seeded


def nyquist(kernel: Kernel) -> Kernel:
    """The last element of a transform of even length is 0."""

    def seeded(x: torch.Tensor) -> torch.Tensor:
        found = kernel(x)
        if x.shape[-1] % 2 == 0:
            found[..., -1] = 0
        return found

    return seeded


def coarse_prime(kernel: Kernel) -> Kernel:
    """Signals of length 251, a prime, are rounded to half precision first."""
    return lambda z: kernel(
        torch.view_as_complex(torch.view_as_real(z).half().to(z.real.dtype)) if z.shape[-1] == 251 else z
    )


def by_process(kernel: Kernel) -> Kernel:
    """The last bits differ between processes, but not within a process."""
    noise = 1 + 2.0**-22 * (os.getpid() % 7)

    def seeded(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal noise
        noise = 1 + 2.0**-22 * (os.getpid() % 7)
        return kernel(*args, **options) * noise

    return seeded


def by_call(kernel: Kernel) -> Kernel:
    """The last bits differ from call to call."""
    count = iter(range(1 << 30))
    return lambda *args, **options: kernel(*args, **options) * (1 + 2.0**-22 * (next(count) % 2))


Model = graph_replay.Model


def graph(name: str, captured: Callable[[Model, torch.Tensor], Model]) -> Probe:
    """Return the probe graph.replay for a CPU, which has no graphs: `captured` replaces capture and replay."""

    def function(context: Context) -> None:
        module: Any = graph_replay
        module.captured = captured
        graph_replay.graph_replay(context)

    return Probe(f"graph.replay:{name}", "quick", "cpu", 60, function)


def stale_graph(model: Model, batch: torch.Tensor) -> Model:
    """A graph that never reads its new input."""
    return lambda values: model(batch)


def old_weights(model: Model, batch: torch.Tensor) -> Model:
    """A graph that keeps the weights with which it was captured: the replays before the weights change are right."""
    kept = {number: model(small_gpt.tokens(number)) for number in range(graph_replay.BATCHES)}
    return lambda values: next(kept[number] for number in kept if torch.equal(small_gpt.tokens(number), values))


def last_bit(model: Model, batch: torch.Tensor) -> Model:
    def replayed(values: torch.Tensor) -> torch.Tensor:
        result = model(values)
        result[-1] = torch.nextafter(result[-1], torch.tensor(9.0))
        return result

    return replayed


def small(name: str, module: Any, attribute: str, wrong: Wrong) -> Probe:
    """Return the probe large with 67591 elements, and with an operation that is wrong from element 2^16 on (on a real
    GPU: 2^31)."""

    def function(context: Context) -> None:
        sizes: Any = large
        sizes.ROWS, sizes.COLUMNS, sizes.PART = 257, 263, 251 * 16
        inner.function(context)

    inner = seeded("large", module, attribute, named(name, wrong), "full")
    return Probe(inner.name, inner.level, inner.needs, inner.timeout, function)


LIMIT = 1 << 16


def overflowing_index(kernel: Any) -> Any:
    """Indices are taken modulo 2^16."""

    def seeded(x: torch.Tensor, key: Any, *value: Any) -> Any:
        if isinstance(key, torch.Tensor) and x.dim() == 1 and x.numel() > LIMIT and key.dtype == torch.int64:
            key = key % LIMIT
        return kernel(x, key, *value)

    return seeded


def overflowing_row(kernel: Any) -> Any:
    def seeded(x: torch.Tensor, key: Any) -> Any:
        if isinstance(key, torch.Tensor) and x.dim() == 2 and x.numel() > LIMIT:
            key = key * x.shape[1] % LIMIT // x.shape[1]
        return kernel(x, key)

    return seeded


def unwritten(kernel: Any) -> Any:
    """Computes only the first 2^16 elements; the others are 0."""

    def seeded(x: torch.Tensor, other: Any) -> torch.Tensor:
        result = kernel(x, other)
        if isinstance(other, int) and x.numel() > LIMIT:
            result[LIMIT:] = 0
        return result

    return seeded


def partial(kernel: Any) -> Any:
    """Adds up only the first 2^16 elements."""

    def seeded(x: torch.Tensor, **options: Any) -> torch.Tensor:
        if x.numel() <= LIMIT:
            return kernel(x, **options)
        return kernel(torch.cat((x.flatten()[:LIMIT], torch.zeros_like(x.flatten()[LIMIT:]))).view_as(x), **options)

    return seeded


def wrapped(kernel: Any) -> Any:
    return lambda x: kernel(x) % LIMIT


def right(kernel: Any) -> Any:
    return kernel


def of(module: Any, name: str, wrong: Wrong, cases: str) -> Probe:
    """Return the probe operations at level standard, with only the fixed cases that have this word in their names."""
    return _reduced(seeded("operations", module, name, wrong, "standard"), cases=cases)


def of_steps(cases: str, module: Any, wrong: Wrong) -> Probe:
    """Return the probe optim.torch with only the fixed cases of one optimizer."""
    return _reduced(seeded("optim.torch", module, "step", wrong), cases=cases)


def of_sampled(
    operation: str, probe: str, module: Any, name: str, wrong: Wrong, level: str = "standard", word: str = ""
) -> Probe:
    """Return a probe with only the cases of one sampled operation that have `word` in their names: the same cases as in
    a run of the whole probe."""
    return _reduced(seeded(probe, module, name, wrong, level), operation=operation, word=word)


def _reduced(inner: Probe, cases: str = "", operation: str = "", word: str = "") -> Probe:
    """Return the probe with only the fixed cases that have the word `cases` in their names, and the cases of the
    sampled operation `operation` that have `word`; none where `cases` or `operation` is empty. This saves time."""

    def function(context: Context) -> None:
        check: Any = pairwise_case_sampling.check
        sampling: Any = pairwise_case_sampling
        sampled = pairwise_case_sampling.cases
        sampling.check = lambda here, some, *rest: check(here, [one for one in some if one.name == operation], *rest)
        sampling.cases = lambda *given: (case for case in sampled(*given) if word in case.name)
        modules: list[Any] = [operations, optim_torch, fft_and_linalg]
        for module, names in zip(modules, (("cases",), ("cases",), ("transforms", "factorizations")), strict=True):
            for name in names:
                setattr(module, name, _with_word(getattr(module, name), cases))
        inner.function(context)

    return Probe(inner.name, inner.level, inner.needs, inner.timeout, function)


def _with_word(every: Callable[..., Iterable[Case]], word: str) -> Callable[..., Iterable[Case]]:
    return lambda **options: (case for case in every(**options) if word in case.name) if word else ()


def lower_alone(kernel: Kernel) -> Kernel:
    """Reads the lower triangle, whatever UPLO is."""
    return lambda a, UPLO="L": kernel(a, UPLO="L")


def transposed_alone(kernel: Kernel) -> Kernel:
    """With `adjoint`, solves with the transposed matrix, which is not conjugated."""

    def seeded(lu: torch.Tensor, pivots: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        if not options["adjoint"]:
            return kernel(lu, pivots, b, **options)
        return kernel(lu, pivots, b.conj().resolve_conj(), **options).conj()

    return seeded


def half_gradient(kernel: Kernel) -> Kernel:
    """A right result whose gradient is half as large."""
    return lambda x, *rest, **options: kernel((x + x.detach()) / 2, *rest, **options)


def scaled_for_last(kernel: Kernel) -> Kernel:
    """A normalized transform over three dimensions is divided only by the size of the last dimension."""

    def seeded(z: torch.Tensor, lengths: Any, dims: Any, norm: str) -> torch.Tensor:
        power = {"backward": 0.0, "ortho": 0.5, "forward": 1.0}[norm]
        if len(dims) < 3 or not power:
            return kernel(z, lengths, dims, norm)
        scaled: torch.Tensor = kernel(z, lengths, dims, "backward") / lengths[-1] ** power
        return scaled

    return seeded


def coarse_long(kernel: Kernel) -> Kernel:
    """Signals longer than a block are rounded to half precision first."""

    def seeded(z: torch.Tensor, n: int, dim: int) -> torch.Tensor:
        pairs = torch.view_as_real(z)
        return kernel(torch.view_as_complex(pairs.half().to(pairs.dtype)) if n > BLOCK else z, n, dim)

    return seeded


def without_mirror(kernel: Kernel) -> Kernel:
    """Pads the ends of a signal with zeros, whatever the padding mode is."""
    return lambda *args, pad_mode="reflect", **options: kernel(*args, pad_mode="constant", **options)


def rounded_up(kernel: Kernel) -> Kernel:
    """Odd dimensions are rotated by one element too many."""
    return lambda x, dims: torch.roll(x, [(x.shape[dim] + 1) // 2 for dim in dims], dims)


def first_of_ties(kernel: Kernel) -> Kernel:
    """The gradient of a maximum goes only to the first of equal elements."""
    return lambda x, dims, keepdim: torch.max(x, dims[0], keepdim)[0] if len(dims) == 1 else kernel(x, dims, keepdim)


def first_place(kernel: Kernel) -> Any:
    """The indices of running maxima are those of the first of equal elements, not of the last."""

    def seeded(x: torch.Tensor, dim: int) -> Any:
        values = kernel(x, dim)[0]
        grows = values.narrow(dim, 1, x.shape[dim] - 1) != values.narrow(dim, 0, x.shape[dim] - 1)
        numbers = torch.arange(1, x.shape[dim]).reshape([-1 if axis == dim else 1 for axis in range(x.dim())])
        places = torch.cat((torch.zeros_like(grows.narrow(dim, 0, 1)).long(), numbers * grows), dim)
        return values, kernel(places, dim)[0]

    return seeded


def empty_row(kernel: Kernel) -> Kernel:
    """The result is NaN if all elements are minus infinity, because infinity is subtracted from infinity."""

    def seeded(x: torch.Tensor, dim: int) -> torch.Tensor:
        largest = x.amax(dim, keepdim=True)
        return (x - largest).exp().sum(dim).log() + largest.squeeze(dim)

    return seeded


def open_bin(kernel: Kernel) -> Kernel:
    """The last bin leaves out its upper edge."""
    return lambda x, bins, low, high: kernel(x[x != high], bins, low, high)


OPTIM: Any = torch.optim
PROBES = (
    of(torch, "addmm", some_beta, "addmm"),
    of(torch, "addmm", reads_for_nothing, "addmm"),
    of(torch, "baddbmm", first_of_batch, "baddbmm"),
    of(torch, "bmm", short_of_gaps, "bmm"),
    of(F, "embedding", overwrites, "embedding"),
    of(F, "embedding", learns_padding, "embedding"),
    of(torch, "cumsum", without_carry, "cumsum"),
    of(torch, "softmax", overflows, "softmax"),
    of(torch, "softmax", short_row, "softmax"),
    of(F, "cross_entropy", counts_ignored, "cross_entropy"),
    of(F, "gelu", swapped_forms, "gelu"),
    of(torch.Tensor, "to", named("cut", cast(SINGLE, BRAIN, cut(16))), " to "),
    of(torch.Tensor, "to", named("half_up", cast(SINGLE, BRAIN, half_up)), " to "),
    of(torch.Tensor, "to", named("flushed", cast(SINGLE, HALF, flushed)), " to "),
    of(torch.Tensor, "to", named("saturated", cast(SINGLE, HALF, lambda x: x.clamp(-65504, 65504))), " to "),
    of(torch.Tensor, "to", named("rounded", cast(SINGLE, torch.int32, torch.round)), " to "),
    of(torch.Tensor, "contiguous", ragged_edge, "copies"),
    of(torch.Tensor, "copy_", unaligned, "copies"),
    of(torch, "max", short_search, "max"),
    of(torch.Tensor, "amax", skips_nan, "max"),
    of(torch, "addmm", named("right", right), "addmm"),
    of_sampled("activation", "operations", F, "silu", sigmoid_tail, "quick"),
    of_sampled("indexing", "operations", torch, "scatter_add", overwritten, "quick"),
    of_sampled("order", "operations", torch, "topk", first_tile_only, "quick"),
    of_sampled("loss", "operations", F, "smooth_l1_loss", one_beta),
    of_sampled("loss of rows", "operations", F, "nll_loss", unweighted, "quick"),
    of_sampled("pooling", "operations", F, "avg_pool2d", counts_padding, "quick"),
    of_sampled("windows as columns", "operations", F, "fold", undilated, "quick"),
    of_sampled("padding", "operations", F, "pad", short_gradient),
    of_sampled("interpolation", "operations", F, "interpolate", by_size),
    of_sampled("sampling at positions", "operations", F, "grid_sample", zeros_outside),
    of_sampled("moved channels", "operations", F, "pixel_shuffle", columns_first),
    of_sampled("blocks by index", "operations", torch, "scatter_reduce", always_included),
    of_sampled("broadcast functions", "operations", torch, "mul", short_sum),
    of_sampled("gates", "operations", F, "prelu", one_weight),
    of_sampled("bits", "operations", torch, "bitwise_right_shift", zero_filled),
    of_sampled(
        "complex numbers", "operations", torch.Tensor, "conj", named("unconjugated", lambda kernel: lambda x: x * 1)
    ),
    of_sampled("ctc loss", "operations", F, "ctc_loss", first_blank),
    of_sampled("embedding bag", "operations", F, "embedding_bag", counts_ignored_rows),
    of_sampled("batched product", "gemm.cases", torch, "bmm", dense_batch, "quick"),
    of_sampled("weighted product", "gemm.cases", torch, "addmm", scaled_added, "quick"),
    of_sampled("linear", "gemm.cases", F, "linear", short_inner, "quick"),
    of_sampled("form of a product", "gemm.cases", torch, "mm", transposed_strides),
    of_sampled("form of a product", "gemm.cases", torch, "addbmm", last_of_batch, "quick"),
    seeded("gemm.cases", torch, "mm", named("right", right)),
    of_steps("AdamW foreach", OPTIM.AdamW, second_launch),
    of_sampled("optimizer", "optim.torch", OPTIM.Adam, "step", first_rate),
    of_sampled("other optimizer", "optim.torch", OPTIM.RMSprop, "step", uncentered),
    of_sampled("SGD of half precision", "optim.torch", OPTIM.SGD, "step", whole_vectors_stay),
    of_sampled("scaled gradients", "optim.torch", torch, "_amp_foreach_non_finite_check_and_unscale_", infinite_step),
    of_steps("SGD fused", OPTIM.SGD, named("plain_momentum", without("nesterov", False, "fused"))),
    of_steps("Adam foreach", OPTIM.Adam, named("no_decay", without("weight_decay", 0.0, "foreach"))),
    _reduced(seeded("fft", torch.fft, "rfft", nyquist), "fft"),
    _reduced(seeded("fft", torch.fft, "fft", coarse_prime), "fft"),
    _reduced(seeded("linalg", torch.linalg, "solve", half_matrix), "solve"),
    _reduced(seeded("linalg", torch.linalg, "cholesky", stale_last_row), "cholesky"),
    _reduced(seeded("linalg", torch.linalg, "qr", named("qr", skewed)), "qr"),
    _reduced(seeded("linalg", torch.linalg, "eigh", named("eigh", skewed)), "eigh"),
    of_sampled("matrix structure", "linalg", torch.linalg, "eigh", lower_alone, word=" eigh "),
    of_sampled("matrix structure", "linalg", torch.linalg, "lu_solve", transposed_alone, word=" lu_solve "),
    of_sampled(
        "matrix structure",
        "linalg",
        torch.linalg,
        "det",
        named("half_gradient_of_det", half_gradient),
        word=" gradient of det ",
    ),
    of_sampled("fft of a block", "fft", torch.fft, "rfftn", scaled_for_last),
    of_sampled("fft of a block", "fft", torch.fft, "irfft", half_gradient),
    of_sampled("fft of a long signal", "fft", torch.fft, "ifft", coarse_long),
    of_sampled("fft of frames", "fft", torch, "stft", without_mirror),
    of_sampled("halves exchanged", "fft", torch.fft, "fftshift", rounded_up),
    of_sampled("gradient of a reduction", "operations", torch, "amax", first_of_ties),
    of_sampled("order along a dimension", "operations", torch, "cummax", first_place),
    of_sampled("special values", "operations", torch, "logsumexp", empty_row),
    of_sampled("counts and places", "operations", torch, "histc", open_bin),
    seeded("transfer", torch.Tensor, "copy_", lost_page),
    seeded("transfer", torch.Tensor, "copy_", unaligned),
    seeded("train.repeat", F, "embedding", by_process),
    seeded("train.repeat", F, "cross_entropy", by_call),
    graph("stale", stale_graph),
    graph("old_weights", old_weights),
    graph("last_bit", last_bit),
    graph("right", lambda model, batch: model),
    small("unwritten", torch.Tensor, "__add__", unwritten),
    small("partial", torch.Tensor, "sum", partial),
    small("gathered", torch.Tensor, "__getitem__", overflowing_index),
    small("rows", torch.Tensor, "__getitem__", overflowing_row),
    small("scattered", torch.Tensor, "__setitem__", overflowing_index),
    small("wrapped", torch.Tensor, "argmax", wrapped),
    small("right", torch.Tensor, "argmax", right),
)
