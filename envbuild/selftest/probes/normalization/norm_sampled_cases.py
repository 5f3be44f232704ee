"""norm.cases: layer_norm, rms_norm, group_norm, batch_norm and instance_norm on sampled arguments.

A batch norm is a group norm of one row in which every channel is a group. One float64 reference serves all norms. It
works on a view of (rows, groups, channels, length) that is normalised over channels and length (SampledNorm.view).

Inputs are integers, shifted or scaled. They are around 0; or far from 0 compared with their deviation; or so small that
epsilon matters; or so large that squares exceed float16's range.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.numerics import backward_pass, hashed_inputs, pairwise_case_sampling, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_nan_gaps import with_nan_gaps
from envbuild.selftest.numerics.operation_case import Case
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point

COUNTS: Mapping[str, Mapping[str, int]] = {
    "layer_norm": {"quick": 48, "standard": 260, "full": 3500},
    "rms_norm": {"quick": 32, "standard": 130, "full": 1500},
    "group_norm": {"quick": 32, "standard": 200, "full": 2500},
    "batch_norm": {"quick": 40, "standard": 260, "full": 3500},
    "instance_norm": {"quick": 16, "standard": 90, "full": 1000},
}
MOST = 40_000  # maximum number of elements of an input
FEWEST = 8  # minimum number of elements normalised together: with two, the result depends only on their order

NEAR, FAR, SMALL, LARGE = "near 0", "far from 0", "small", "large"
# the centre of values far from 0; half-precision dtypes represent integers around CENTRE_NEARER exactly
CENTRE, CENTRE_NEARER = 4000.0, 64.0
WHOLE, WHOLE_FAR = 8, 3  # the largest integer; in half precision, the largest integer that is added to a centre
SCALE = 512.0
EPSILONS = (1e-12, 1e-6, 1e-5, 1e-3, 1.0)
# the smallest scale, with which float16 still represents the reciprocal of the deviation
FINEST = {torch.float16: 2.0**-12}
# As in norm_torch.py: torch's CPU kernels keep mean and 1 / sigma in the input's dtype, and sum the weights' gradients
# in it.
ROUNDINGS_X, ROUNDINGS_WEIGHT = 2, 2
# As in norm_fixed_cases.torch_norms: the number of roundings to the input's dtype, on every device. Batch norms keep
# their statistics in this dtype.
ROUNDINGS = {"rms_norm": 5, "group_norm": 2, "batch_norm": 2, "instance_norm": 2}
_REFUSED = ("dtype", "scalar type", "not implemented for", "data type")

DIMENSIONS: Mapping[str, Sequence[Any]] = {
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "weights": ("weight and bias", "weight and bias", "weight", "no weight", "float32 weight and bias"),
    "epsilon": EPSILONS,
    "values": (NEAR, FAR, SMALL, LARGE),
    "layout": ("contiguous", "last two swapped", "rows apart", "batch apart", "shifted by 1"),
    "gradient layout": ("contiguous", "rows apart", "last two swapped"),
}
ROWS: Mapping[str, Sequence[Any]] = {
    **DIMENSIONS,
    "rows": ((1,), (5,), (9,), (131,), (3, 5), (2, 3, 4)),
    "width": (0, 16, 32, 64, 128, 256, 512, 1024, 4096),
    "past": (1, -1, 0, 2, 3, 5, 8, -3, -8),
    # size of the first of two normalised dimensions; 1 means that only one dimension is normalised
    "outer width": (1, 1, 3),
}
IMAGES: Mapping[str, Sequence[Any]] = {
    **DIMENSIONS,
    "layout": (*DIMENSIONS["layout"], "channels last", "channels last"),
    "gradient layout": (*DIMENSIONS["gradient layout"], "channels last"),
    "batch": (1, 2, 3, 5, 129),
    "places": ((), (1,), (9,), (33,), (5, 7), (16, 17), (1, 65), (2, 3, 5), (4, 7, 9)),
}
CHANNELS = (1, 3, 4, 8, 15, 17, 32, 33, 65, 129)


@dataclass(frozen=True)
class SampledNorm:
    """One call of a norm on an input of `shape`."""

    kind: str
    dtype: torch.dtype
    weights: str
    epsilon: float | None
    values: str
    layout: str
    gradient_layout: str
    shape: tuple[int, ...]
    groups: int = 1
    normalised: int = 1  # number of normalised dimensions of a layer norm or an RMS norm
    # of a batch norm: training mode; of an instance norm: whether it uses the input's own statistics
    training: bool = True
    tracked: bool = False
    momentum: float = 0.1

    @classmethod
    def at(cls, kind: str, point: Point) -> SampledNorm:
        fields: dict[str, Any] = {name.replace(" ", "_"): point[name] for name in DIMENSIONS}
        if kind in ("layer_norm", "rms_norm"):
            width = point["width"] + point["past"] if point["width"] else FEWEST + abs(point["past"])
            outer = (point["outer width"],) if point["outer width"] > 1 else ()
            fields.update(shape=(*point["rows"], *outer, width), normalised=1 + len(outer))
        elif kind == "group_norm":
            channels = point["groups"] * point["channels"]
            fields.update(shape=(point["batch"], channels, *point["places"]), groups=point["groups"])
        else:
            fields["training"], fields["tracked"] = point["statistics"]
            fields.update(shape=(point["batch"], point["channels"], *point["places"]), momentum=point["momentum"])
        return cls(kind, **fields)

    @property
    def is_half(self) -> bool:
        return self.dtype != torch.float32

    @property
    def parameters(self) -> torch.dtype:
        """The dtype of weights and running statistics."""
        return torch.float32 if "float32" in self.weights else self.dtype

    @property
    def backward(self) -> bool:
        """Whether gradients are checked. With values far from 0 they are not, because an error of the mean may change
        every digit of a gradient."""
        return self.values != FAR

    @property
    def centre(self) -> float:
        """The offset added to the integers. Batch and instance norms have the nearer one, because cuDNN does not
        document how it computes the variance."""
        if self.values != FAR:
            return 0.0
        return CENTRE_NEARER if self.is_half or self.kind in ("batch_norm", "instance_norm") else CENTRE

    @property
    def scale(self) -> float:
        """The factor of the integers, a power of two. For small values it is so small that epsilon matters."""
        if self.values != SMALL:
            return SCALE if self.values == LARGE else 1.0
        epsilon = torch.finfo(self.dtype).eps if self.epsilon is None else self.epsilon
        return max(2.0 ** round(math.log2(2 * math.sqrt(epsilon) / WHOLE)), FINEST.get(self.dtype, 0.0))

    @property
    def affine(self) -> tuple[int, ...]:
        """The shape of a weight."""
        return self.shape[-self.normalised :] if self.kind in ("layer_norm", "rms_norm") else self.shape[1:2]

    @property
    def name(self) -> str:
        epsilon = "default epsilon" if self.epsilon is None else f"epsilon {self.epsilon:g}"
        groups = f" in {self.groups} groups" if self.kind == "group_norm" else ""
        over = f" over the last {self.normalised}" if self.normalised > 1 else ""
        how = (
            ", from running statistics" if not self.training else f", momentum {self.momentum}" if self.tracked else ""
        )
        layouts = f"{self.layout}" + (f", gradient {self.gradient_layout}" if self.backward else "")
        shape = "x".join(map(str, self.shape))
        return f"{self.kind} of {shape}{groups}{over}, {self.weights}{how}, {epsilon}, {layouts}, values {self.values}"

    def view(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as (rows, groups, channels, length), which is normalised over the last two dimensions."""
        if self.kind in ("layer_norm", "rms_norm"):
            return x.reshape(-1, 1, math.prod(self.affine), 1)
        if self.kind == "batch_norm":
            return x.transpose(0, 1).reshape(1, self.shape[1], 1, -1)
        groups = self.shape[1] if self.kind == "instance_norm" else self.groups
        return x.reshape(self.shape[0], groups, self.shape[1] // groups, -1)

    def back(self, view: torch.Tensor) -> torch.Tensor:
        """The inverse of `view`."""
        if self.kind == "batch_norm":
            return view.reshape(self.shape[1], self.shape[0], *self.shape[2:]).transpose(0, 1)
        return view.reshape(self.shape)

    @property
    def together(self) -> int:
        """The number of elements that are normalised together."""
        if self.kind in ("layer_norm", "rms_norm"):
            return math.prod(self.affine)
        if self.kind == "batch_norm":
            return math.prod(self.shape) // self.shape[1]
        return math.prod(self.shape[1:]) // (self.shape[1] if self.kind == "instance_norm" else self.groups)


def possible(point: Point, kind: str) -> bool:
    """Return whether the combination of parameter values (`point`) can be tested. It must not be too large and must
    have enough elements to normalise. Each element must affect the result, and no statistic may exceed the range of its
    dtype."""
    norm = SampledNorm.at(kind, point)
    if math.prod(norm.shape) > MOST or norm.together < FEWEST:
        return False
    if norm.values == FAR and norm.is_half:
        return kind == "layer_norm" or (kind == "rms_norm" and norm.dtype == torch.float16)
    # For channels last, torch's CPU kernel computes the variance as a difference of squares.
    if norm.values == FAR and kind == "group_norm" and norm.layout == "channels last":
        return False
    # torch's instance_norm on the CPU misreads the memory layout of a channels-last gradient with one sample.
    if kind == "instance_norm" and norm.shape[0] == 1 and norm.gradient_layout == "channels last":
        return False
    if kind in ("batch_norm", "instance_norm") and norm.values in (SMALL, LARGE):
        return not norm.is_half and norm.training and not (norm.tracked and norm.values == LARGE)
    if kind == "rms_norm" and norm.epsilon is None and (norm.is_half or norm.values == FAR):
        return False
    if kind == "rms_norm" and norm.parameters != norm.dtype:
        return False
    return norm.training or norm.values == NEAR


def sampled_operations() -> tuple[Operation, ...]:
    """The operations of this probe."""
    statistics = {"statistics": ((True, False), (True, True), (True, True), (False, True)), "momentum": (0.1, 0.5)}
    spaces: dict[str, Mapping[str, Sequence[Any]]] = {
        "layer_norm": ROWS,
        "rms_norm": {**ROWS, "epsilon": (None, *EPSILONS)},
        "group_norm": {**IMAGES, "groups": (1, 2, 3, 4, 8, 32), "channels": (1, 2, 3, 4, 5, 8)},
        "batch_norm": {**IMAGES, "channels": CHANNELS, **statistics},
        "instance_norm": {**IMAGES, "channels": CHANNELS, **statistics},
    }
    return tuple(
        Operation(
            kind,
            space,
            functools.partial(case, kind=kind),
            COUNTS[kind],
            functools.partial(possible, kind=kind),
        )
        for kind, space in spaces.items()
    )


def norm_cases(context: Context) -> None:
    """norm.cases: layer, RMS, group, batch and instance norms over sampled shapes, strides and epsilons are right."""
    pairwise_case_sampling.check(context, OPERATIONS)


def case(point: Point, seed: int, kind: str) -> Case:
    """Build the case for one combination of parameter values (`point`)."""
    norm = SampledNorm.at(kind, point)
    names = ["x"]
    if norm.backward:
        names.append("grad")
    if norm.weights != "no weight":
        names.append("weight")
        if "bias" in norm.weights and kind != "rms_norm":
            names.append("bias")
    if norm.tracked:
        names += ["mean", "variance"]
    given = tuple(_values(norm, name, 8 * seed + n) for n, name in enumerate(names))
    run = functools.partial(_run, names=names, norm=norm)
    exact = functools.partial(_exact, names=names, norm=norm)
    return Case(norm.name, norm.dtype, given, run, exact)


def _values(norm: SampledNorm, name: str, seed: int) -> torch.Tensor:
    if name == "grad":
        return hashed_inputs.whole(norm.shape, seed, 3).to(norm.dtype)
    if name != "x":
        found = hashed_inputs.whole(norm.affine, seed, 3)
        return (found.abs() if name == "variance" else found).to(norm.parameters)
    most = WHOLE_FAR if norm.values == FAR and norm.is_half else WHOLE
    return hashed_inputs.whole(norm.shape, seed, most).to(norm.dtype)


def _run(*given: torch.Tensor, names: Sequence[str], norm: SampledNorm) -> dict[str, torch.Tensor]:
    """Return the result, its gradients and the running statistics. A call with a different epsilon and different values
    comes first, so that state kept from an earlier call is detected."""
    tensors = dict(zip(names, given))
    leaves: dict[str, torch.Tensor] = {n: tensors[n].detach().clone() for n in ("weight", "bias") if n in tensors}
    leaves["x"] = with_nan_gaps(norm.centre + norm.scale * tensors["x"], norm.layout).detach()
    statistics: dict[str, torch.Tensor] = {n: tensors[n].clone() for n in ("mean", "variance") if n in tensors}
    epsilon = 1e-2 if norm.epsilon is None else 16 * norm.epsilon
    try:
        with torch.no_grad():
            others = {name: values.clone() for name, values in statistics.items()}
            _call(norm, {**leaves, "x": -leaves["x"]}, others, epsilon)
        for values in leaves.values():
            values.requires_grad_(norm.backward)
        y = _call(norm, leaves, statistics, norm.epsilon)
        found = {"output": y.detach()}
        if norm.backward:
            grad = with_nan_gaps(tensors["grad"].to(y.dtype), norm.gradient_layout)
            computed = backward_pass.gradients(y, tuple(leaves.values()), grad)
            found.update(zip((f"gradient of {name}" for name in leaves), computed))
    except RuntimeError as error:
        if any(words in str(error) for words in _REFUSED):
            raise NotImplementedError(str(error)) from error
        raise
    return {**found, **({f"running {name}": values for name, values in statistics.items()} if norm.training else {})}


def _call(
    norm: SampledNorm, leaves: Mapping[str, torch.Tensor], statistics: Mapping[str, torch.Tensor], epsilon: float | None
) -> torch.Tensor:
    x, weight, bias = leaves["x"], leaves.get("weight"), leaves.get("bias")
    mean, variance = statistics.get("mean"), statistics.get("variance")
    if norm.kind == "rms_norm":
        if not hasattr(F, "rms_norm"):
            raise NotImplementedError(f"torch {torch.__version__} has no rms_norm")
        return F.rms_norm(x, norm.affine, weight, epsilon)
    assert epsilon is not None
    if norm.kind == "layer_norm":
        return F.layer_norm(x, norm.affine, weight, bias, epsilon)
    if norm.kind == "group_norm":
        return F.group_norm(x, norm.groups, weight, bias, epsilon)
    if norm.kind == "batch_norm":
        return F.batch_norm(x, mean, variance, weight, bias, norm.training, norm.momentum, epsilon)
    return F.instance_norm(x, mean, variance, weight, bias, norm.training, norm.momentum, epsilon)


def _exact(*given: torch.Tensor, names: Sequence[str], norm: SampledNorm) -> dict[str, Exact]:
    """Return the exact results with their tolerances. The magnitudes (the same formula with every term positive) are
    those of norm_fixed_cases.exact_norm."""
    tensors = dict(zip(names, given))
    x = norm.view(norm.centre + norm.scale * tensors["x"])
    epsilon = torch.finfo(norm.dtype).eps if norm.epsilon is None else norm.epsilon

    def of_channels(name: str, default: float) -> torch.Tensor:
        values = tensors.get(name)
        return x.new_full((), default) if values is None else values.reshape(1, x.shape[1], -1, 1)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return values.mean((2, 3), keepdim=True)

    weight, bias = of_channels("weight", 1.0), of_channels("bias", 0.0)
    centred = float(norm.kind != "rms_norm" and norm.training)  # 1 if the input's own mean is subtracted, else 0
    own = float(norm.training)  # 1 if the deviation is the input's own, else 0
    centre = centred * mean(x) if norm.training else of_channels("mean", 0.0)
    distance = x.abs()
    absolute = centred * mean(distance) if norm.training else centre.abs()
    shifted = x - centre
    variance = mean(shifted.square()) if norm.training else of_channels("variance", 1.0)
    sigma = (variance + epsilon).sqrt()
    unit, spread = shifted / sigma, (distance + absolute) / sigma

    roundings: float = ROUNDINGS.get(norm.kind, 0) if norm.is_half else 0
    if norm.kind == "group_norm" and norm.is_half:
        roundings += _of_rounded_epsilon(epsilon, float(variance.min()), norm.dtype)
    bound = functools.partial(_bound, norm=norm, n=x.shape[2] * x.shape[3])
    result = {
        "output": bound(norm.back(unit * weight + bias), norm.back(spread * weight.abs() + bias.abs()), roundings)
    }
    if norm.backward:
        grad = norm.view(tensors["grad"])
        back = grad * weight
        forth = back.abs()
        value = (back - centred * mean(back) - unit * (own * mean(back * unit))) / sigma
        size = (forth + centred * mean(forth) + spread * (own * mean(forth * spread))) / sigma
        on_way = roundings + (ROUNDINGS_X if norm.is_half else 0)
        result["gradient of x"] = bound(norm.back(value), norm.back(size), on_way, 2)
        added = ROUNDINGS_WEIGHT + x.shape[0] * (x.shape[3] if norm.kind == "batch_norm" else 1)
        on_way = roundings + (added if norm.is_half else 0)
        terms = x.shape[0] * x.shape[3]
        one = torch.ones((), dtype=torch.float64)
        for name, factor, most in (("weight", unit, spread), ("bias", one, one)):
            if name in tensors:
                value, size = (part.sum((0, 3)).reshape(norm.affine) for part in (grad * factor, grad.abs() * most))
                result[f"gradient of {name}"] = bound(
                    value, size, on_way, 2, n=max(terms, x.shape[2] * x.shape[3]), dtype=norm.parameters
                )
    if norm.tracked and norm.training:
        result.update(_statistics(norm, tensors, x))
    return result


def _of_rounded_epsilon(epsilon: float, variance: float, dtype: torch.dtype) -> float:
    """Return the error of a result and its gradients if epsilon is rounded to `dtype`, in units of a rounding to
    `dtype`. torch's CUDA kernel of group_norm rounds epsilon this way. The relative change of 1 / sigma is half of that
    of variance + epsilon, and 1 / sigma enters a gradient three times."""
    rounded = float(torch.tensor(epsilon, dtype=dtype))
    change = abs(rounded - epsilon) / (2 * (variance + min(epsilon, rounded)))
    return 3 * change / tolerances.unit_roundoff(dtype)


def _bound(
    value: torch.Tensor,
    magnitude: torch.Tensor,
    roundings: float,
    times: int = 1,
    *,
    norm: SampledNorm,
    n: int,
    dtype: torch.dtype | None = None,
) -> Exact:
    arithmetic = tolerances.norm(magnitude, n, times, norm.dtype, roundings)
    return Exact(value, tolerances.rounding(value, norm.dtype if dtype is None else dtype) + arithmetic)


def _statistics(norm: SampledNorm, tensors: Mapping[str, torch.Tensor], x: torch.Tensor) -> dict[str, Exact]:
    """Return the running statistics with their tolerances; an instance norm averages them over the rows. An error of
    the mean changes each x - mean, and thereby the variance. In half precision, the new statistics are rounded before
    and after they are added."""
    n = x.shape[2] * x.shape[3]
    centre, size = x.mean((2, 3), keepdim=True), x.abs().mean((2, 3), keepdim=True)
    shifted = x - centre
    variance = shifted.square().sum((2, 3)) / (n - 1)
    moved = 4 * tolerances.summation(n) * (2 * (shifted.abs() * (x.abs() + size)).mean((2, 3)) + variance)
    found = {}
    for name, new, error in (
        ("mean", centre[..., 0, 0], 4 * tolerances.summation(n) * size[..., 0, 0]),
        ("variance", variance, moved * n / (n - 1)),
    ):
        new, error = new.mean(0), error.mean(0)
        value = (1 - norm.momentum) * tensors[name] + norm.momentum * new
        magnitude = (1 - norm.momentum) * tensors[name].abs() + norm.momentum * new.abs()
        rounded = 4 * tolerances.rounding(magnitude, norm.parameters) + 4 * tolerances.summation(len(x)) * magnitude
        if norm.is_half:
            rounded = rounded + tolerances.rounding(norm.momentum * new, norm.dtype)
        found[f"running {name}"] = Exact(value, norm.momentum * error + rounded)
    return found


OPERATIONS = sampled_operations()
