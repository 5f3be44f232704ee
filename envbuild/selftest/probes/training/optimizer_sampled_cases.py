"""Steps of SGD, Adam and AdamW with sampled options, sizes and gradient layouts, compared with the same steps in
float64. Clipping of gradients by their norm is tested too.

Each gradient, negated if `maximize` is set, has the sign of its parameter. Gradient and weight decay then have the same
sign, so |update| is the sum of the magnitudes of its terms, without cancellation. Gradients may shrink from step
to step, because otherwise amsgrad has no effect. The last parameter may get its first gradient one step later than the
others, so that its step count is lower.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from envbuild.selftest.numerics import hashed_inputs, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.operation_case import Case
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point

CHUNK = 65536  # elements of a tensor that one block of a multi-tensor kernel processes (torch's MultiTensorApply.cuh)
STEPS = 4
RATE = 2.0**-3
FIXED = "fixed"
COUNTS = {"standard": 60, "full": 500}

SPACE: Mapping[str, Sequence[Any]] = {
    "kind": ("SGD", "Adam", "AdamW"),
    "implementation": ("loop", "foreach", "fused"),
    "shapes": ("few", "few", "matrices", "many", "chunk", "scalar"),
    "past": (1, 4, 7, -1),  # added to the length of a chunk or of a vector load
    "decay": (0.0, 2.0**-4),
    "maximize": (False, True),
    "momentum": (0.0, 0.5, 0.9),
    "damping": ("none", "dampening", "nesterov"),
    "betas": ((0.9, 0.999), (0.4, 0.99), (0.9, 0.5)),
    "epsilon": (1e-8, 2.0**-6),
    "amsgrad": (False, True),
    "fading": (False, True),
    "late": (False, True),
    "gradients": ("contiguous", "turned"),
    "capturable": (False, True),  # used only on GPUs
    "rate": (FIXED, FIXED, "halved after each step", "a tensor"),
}
CLIPPED: Mapping[str, Sequence[Any]] = {
    "foreach": (False, True),
    "shapes": ("chunk", "chunk", "many", "few", "scalar"),
    "past": SPACE["past"],
    "norm": (2.0, 2.0, 1.0, math.inf),
    "share": (0.25, 4.0),  # the allowed norm as a share of the actual norm; above 1 nothing is clipped
}
IMPLEMENTATIONS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def sampled_operations(on_gpu: bool) -> tuple[Operation, ...]:
    """Return the sampled operations; `capturable` is used only on GPUs."""
    return (
        Operation("optimizer", SPACE, functools.partial(case, on_gpu=on_gpu), COUNTS),
        Operation("clipped gradients", CLIPPED, clipped, {"standard": 48, "full": 200}),
    )


def case(point: Point, seed: int, on_gpu: bool) -> Case:
    """Build the case for one combination of optimizer options (`point`). Its inputs are the initial parameters and the
    gradients of several steps."""
    point = {**point, "capturable": point["capturable"] and on_gpu}
    shapes, late = shapes_of(point), _is_late(point)
    sizes = [math.prod(shape) for shape in shapes]
    count = sum(sizes)
    signs = hashed_inputs.signs(count, 30 * seed)
    given = [signs * (1 + hashed_inputs.uniform((count,), 30 * seed + 1))]
    turned = -1 if point["maximize"] else 1
    for step in range(STEPS):
        scale = 4.0**-step if point["fading"] else 1.0
        gradient = turned * scale * signs * (0.25 + 0.75 * hashed_inputs.uniform((count,), 30 * seed + 2 + step))
        given.append(gradient[: count - sizes[-1]] if late and step == 0 else gradient)
    options = ", ".join(f"{name} {value}" for name, value in options_of(point).items() if value)
    name = (
        f"{point['kind']} {point['implementation']}, {STEPS} steps of {len(shapes)} tensors {shapes[0]} to {shapes[-1]}"
    )
    how = f", rate {point['rate']}{', fading' if point['fading'] else ''}{', last one late' if late else ''}"
    how += f", gradients {_layout(point)}"
    run = functools.partial(run_steps, point=point, options=options_of(point))
    exact = functools.partial(exact_steps, point=point)
    return Case(f"{name}, {options}{how}", torch.float32, tuple(given), run, exact)


def clipped(point: Point, seed: int) -> Case:
    """Build a case that clips gradients with torch.nn.utils.clip_grad_norm_ and returns their total norm.

    The last element of each tensor is so large that it affects the Euclidean norm of a chunk: its square is about 0.7%
    to 2.7% of the sum of squares of a full chunk, and more of a shorter one.
    """
    shapes = shapes_of(point)
    sizes = [math.prod(shape) for shape in shapes]
    count = sum(sizes)
    x = hashed_inputs.signs(count, seed) * (1 + hashed_inputs.uniform((count,), seed + 1))
    x[torch.tensor(sizes).cumsum(0) - 1] *= 32
    most = float(torch.linalg.vector_norm(x.double(), point["norm"])) * point["share"]
    how = "foreach" if point["foreach"] else "one by one"
    name = f"clip_grad_norm_ {how}, norm {point['norm']:g}, {len(shapes)} tensors {shapes[0]} to {shapes[-1]}"
    run = functools.partial(_clip, point=point, most=most)
    exact = functools.partial(_clip_exactly, point=point, most=most)
    return Case(f"{name}, {point['share']:g} of it", torch.float32, (x,), run, exact)


def _clip(x: torch.Tensor, point: Point, most: float) -> dict[str, torch.Tensor]:
    shapes = shapes_of(point)
    parts = torch.split(x.clone(), [math.prod(shape) for shape in shapes])
    leaves = [torch.nn.Parameter(torch.zeros(shape, device=x.device)) for shape in shapes]
    for leaf, part in zip(leaves, parts):
        leaf.grad = part.reshape(leaf.shape)
    norm = torch.nn.utils.clip_grad_norm_(leaves, most, point["norm"], foreach=point["foreach"])
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return {"norm": norm, "gradients": torch.cat([gradient.flatten() for gradient in gradients])}


def _clip_exactly(x: torch.Tensor, point: Point, most: float) -> dict[str, Exact]:
    """Return the exact norm and clipped gradients. torch computes the norm of the tensors' norms in float32, and adds
    1e-6 to this norm before the division (documentation of clip_grad_norm_)."""
    size = x.abs()
    norm = {2.0: size.square().sum().sqrt(), 1.0: size.sum(), math.inf: size.amax()}[point["norm"]]
    error = 4 * tolerances.summation(len(x))
    clipped = x * torch.clamp(most / (norm + 1e-6), max=1.0)
    return {
        "norm": Exact(norm, tolerances.rounding(norm, torch.float32) + error * norm),
        "gradients": Exact(clipped, tolerances.rounding(clipped, torch.float32) + 2 * error * clipped.abs()),
    }


def shapes_of(point: Point) -> list[tuple[int, ...]]:
    past = point["past"]
    return {
        "few": [(32 + past,), (1,), (5, 3)],
        "matrices": [(8 + past, 33), (3, 16 + past, 5), (17, 2)],
        "many": [*((number % 5 + 1, 2) for number in range(113)), (2, 4 + past)],
        "chunk": [(CHUNK + past,), (3, 11)],
        "scalar": [(), (64 + past,), (3, 2)],
    }[point["shapes"]]


def _is_late(point: Point) -> bool:
    """Return whether the last parameter starts late. SGD's fused steps exclude this, because they need momentum for all
    parameters or for none."""
    return bool(point["late"]) and (point["kind"], point["implementation"]) != ("SGD", "fused")


def options_of(point: Point) -> dict[str, Any]:
    common = {"lr": RATE, "weight_decay": point["decay"], "maximize": point["maximize"]}
    if point["kind"] == "SGD":
        momentum, damping = point["momentum"], point["damping"] if point["momentum"] else "none"
        dampening = 0.25 if damping == "dampening" else 0.0
        return {**common, "momentum": momentum, "dampening": dampening, "nesterov": damping == "nesterov"}
    found = {**common, "betas": point["betas"], "eps": point["epsilon"], "amsgrad": point["amsgrad"]}
    return {**found, "capturable": True} if point["capturable"] else found


def run_steps(
    start: torch.Tensor, *gradients: torch.Tensor, point: Point, options: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the parameters after each step of the optimizer that `point` names."""
    sizes = [math.prod(shape) for shape in shapes_of(point)]
    parameters = parameters_of(start, point)
    rate: float | torch.Tensor = options["lr"]
    if point["rate"] == "a tensor" and _takes_tensors(point):
        rate = torch.tensor(rate, device=start.device)
    optimizer = getattr(torch.optim, point["kind"])(
        parameters, **{**options, "lr": rate, **IMPLEMENTATIONS[point["implementation"]]}
    )
    found = {}
    for number, gradient in enumerate(gradients, start=1):
        kept = sizes if len(gradient) == len(start) else sizes[:-1]
        parts = itertools.chain(torch.split(gradient, kept), [None] * (len(sizes) - len(kept)))
        for parameter, part in zip(parameters, parts):
            parameter.grad = None if part is None else _gradient_copy(part.reshape(parameter.shape), _layout(point))
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * _factor(point)
        found[f"step {number}"] = joined_parameters(parameters)
    return found


def parameters_of(start: torch.Tensor, point: Point) -> list[torch.nn.Parameter]:
    """Return parameters with the values in `start`."""
    shapes = shapes_of(point)
    parts = torch.split(start, [math.prod(shape) for shape in shapes])
    return [torch.nn.Parameter(part.reshape(shape).clone()) for part, shape in zip(parts, shapes)]


def joined_parameters(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The values of all parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def _takes_tensors(point: Point) -> bool:
    """Return whether this test passes the learning rate as a tensor: from torch 2.1 on, not for SGD, and not with
    foreach."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return version >= (2, 1) and point["kind"] != "SGD" and point["implementation"] != "foreach"


def _factor(point: Point) -> float:
    """Return the factor that multiplies the learning rate after each step, as a scheduler does."""
    return 0.5 if point["rate"] == "halved after each step" else 1.0


def _layout(point: Point) -> str:
    """Return the layout of the gradients. Fused kernels require the layout of the parameter, and torch's CPU kernels do
    not check it."""
    return "contiguous" if point["implementation"] == "fused" else str(point["gradients"])


def _gradient_copy(gradient: torch.Tensor, layout: str) -> torch.Tensor:
    """Copy a gradient, because foreach optimizers write to gradients."""
    if layout == "turned" and gradient.dim() > 1:
        return gradient.transpose(-1, -2).clone(memory_format=torch.contiguous_format).transpose(-1, -2)
    return gradient.clone()


def exact_steps(start: torch.Tensor, *gradients: torch.Tensor, point: Point) -> dict[str, Exact]:
    """Return the steps in float64 with their tolerances.

    The tolerance of a step is added to twice the tolerance of the previous step. The factor of two accounts for the
    decay: an error of a parameter also changes its next update, by less than the error itself.
    """
    p, limit, count = start, torch.zeros_like(start), torch.zeros_like(start)
    first, second, most = (torch.zeros_like(start) for _ in range(3))
    sign, decay, (beta, beta2) = -1.0 if point["maximize"] else 1.0, point["decay"], point["betas"]
    options, found = options_of(point), {}
    for number, part in enumerate(gradients, start=1):
        rate = RATE * _factor(point) ** (number - 1)
        takes = torch.arange(len(start)) < len(part)
        gradient = sign * torch.cat((part, part.new_zeros(len(start) - len(part))))
        count = count + takes
        steps = count.clamp(min=1)
        decayed = gradient if point["kind"] == "AdamW" else gradient + decay * p
        if point["kind"] == "SGD":
            # dampening does not apply to the first gradient
            kept = torch.where(count > 1, 1 - options["dampening"], 1.0)
            buffer = options["momentum"] * first + kept * decayed
            update = decayed + options["momentum"] * buffer if options["nesterov"] else buffer
            correction = 0.0
        else:
            buffer = beta * first + (1 - beta) * decayed
            squares = beta2 * second + (1 - beta2) * decayed**2
            highest = torch.maximum(most, squares)
            root = ((highest if point["amsgrad"] else squares) / (1 - beta2**steps)).sqrt()
            update = buffer / (1 - beta**steps) / (root + point["epsilon"])
            correction = _correction(point, number)
            second, most = torch.where(takes, squares, second), torch.where(takes, highest, most)
        if point["kind"] == "AdamW":
            update = update + decay * p
        first, update = torch.where(takes, buffer, first), torch.where(takes, update, 0.0)
        p = p - rate * update
        # Adam's tolerance serves SGD too, which has fewer roundings.
        limit = (
            2 * limit + tolerances.rounding(p, torch.float32) + tolerances.adam(rate, update.abs(), number, correction)
        )
        found[f"step {number}"] = Exact(p, limit)
    return found


def _correction(point: Point, number: int) -> float:
    """Return the error of the bias corrections. With `capturable`, the device computes the powers of the betas in
    float32."""
    if not point["capturable"]:
        return 0.0
    # The late parameter has a lower step number, at which an error of a power has more effect.
    step = max(1, number - 1) if _is_late(point) else number
    return tolerances.power_correction(point["betas"][0], step) + tolerances.power_correction(point["betas"][1], step)


OPERATIONS = sampled_operations(on_gpu=False)
