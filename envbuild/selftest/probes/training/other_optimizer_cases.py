"""optim.torch: steps of RMSprop, Adagrad, Adadelta, Adamax, NAdam and RAdam, of SGD with half-precision parameters, and
with scaled gradients, some of which are not finite.

The formulas are those in the documentation of torch.optim. As in optimizer_sampled_cases, effective gradients have the
signs of the parameters, so that |update| is the sum of the magnitudes of its terms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from envbuild.selftest.numerics import hashed_inputs, tolerances, torch_fault_exclusions
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point
from envbuild.selftest.probes.training import optimizer_sampled_cases
from envbuild.selftest.probes.training.optimizer_sampled_cases import FIXED, IMPLEMENTATIONS, RATE, SPACE

STEPS = 7  # with a second beta of 0.9, RAdam rectifies its steps from the sixth on
SMALL_SHAPES = ("few", "few", "matrices", "matrices", "many", "scalar", "scalar", "chunk")
MOMENTUM_DECAY = 2.0**-3  # NAdam's option

OTHERS: Mapping[str, Sequence[Any]] = {
    "kind": ("RMSprop", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam"),
    "implementation": ("loop", "foreach"),
    "shapes": SMALL_SHAPES,
    "past": SPACE["past"],
    "decay": (0.0, 2.0**-4),
    "maximize": (False, True),
    "betas": ((0.9, 0.9), (0.5, 0.9), (0.8, 0.9)),
    "epsilon": (1e-8, 2.0**-6),
    "momentum": (0.0, 0.5),  # only RMSprop
    "centered": (False, True),  # only RMSprop
    "rate decay": (0.0, 0.25),  # only Adagrad
    "decoupled": (False, True),  # the decay of NAdam and RAdam
    "gradients": ("contiguous", "turned"),
    "rate": (FIXED, "halved after each step"),
}
HALVES: Mapping[str, Sequence[Any]] = {
    "dtype": (torch.float16, torch.bfloat16),
    "implementation": ("loop", "foreach", "fused"),
    "shapes": SMALL_SHAPES,
    "past": SPACE["past"],
    "momentum": (0.0, 0.5),
    "nesterov": (False, True),
    "maximize": (False, True),
    "gradients": ("contiguous", "turned"),
}
SCALED: Mapping[str, Sequence[Any]] = {
    "kind": ("SGD", "Adam", "AdamW"),
    "implementation": ("loop", "foreach", "fused"),
    "shapes": ("few", "few", "matrices", "matrices", "many", "chunk"),
    "past": SPACE["past"],
    "bad": (math.inf, -math.inf, math.nan),  # the value of one gradient element in the bad step
    "at": ("first", "middle", "last"),
    "bad step": (1, 2, 3, None),
    "interval": (1, 2),  # the scale is doubled after this many consecutive good steps
}


def sampled_operations() -> tuple[Operation, ...]:
    """The sampled operations."""
    return (
        Operation("other optimizer", OTHERS, other, {"standard": 42, "full": 500}, _possible),
        Operation("SGD of half precision", HALVES, of_halves, {"standard": 18, "full": 200}, _possible_half),
        Operation("scaled gradients", SCALED, scaled, {"standard": 18, "full": 300}),
    )


def _possible(point: Point) -> bool:
    """Return whether the optimizer has the options in `point`. A decreasing rate is excluded for RAdam: its last steps
    would be too small to show a changed gradient."""
    kind = point["kind"]
    return (
        (kind != "RAdam" or point["rate"] == FIXED)
        and (kind == "RMSprop" or not (point["momentum"] or point["centered"]))
        and (kind == "Adagrad" or not point["rate decay"])
        and ((kind in ("NAdam", "RAdam") and point["decay"]) or not point["decoupled"])
        and (kind in ("Adamax", "NAdam", "RAdam") or point["betas"] == OTHERS["betas"][0])
    )


def _possible_half(point: Point) -> bool:
    return bool(point["momentum"] or not point["nesterov"])


def other(point: Point, seed: int) -> Case:
    """Build the case for one combination of options (`point`). Its inputs are the initial parameters and the gradients
    of each step."""
    shapes = optimizer_sampled_cases.shapes_of(point)
    count = sum(map(math.prod, shapes))
    signs = hashed_inputs.signs(count, 30 * seed)
    turned = -1 if point["maximize"] else 1
    given = [signs * (1 + hashed_inputs.uniform((count,), 30 * seed + 1))]
    for step in range(STEPS if point["kind"] == "RAdam" else optimizer_sampled_cases.STEPS):
        given.append(turned * signs * (0.25 + 0.75 * hashed_inputs.uniform((count,), 30 * seed + 2 + step)))
    options = _options(point)
    shown = ", ".join(f"{name} {value}" for name, value in options.items() if value)
    name = (
        f"{point['kind']} {point['implementation']}, {len(given) - 1} steps of {len(shapes)} tensors {shapes[0]} to "
        f"{shapes[-1]}, {shown}, rate {point['rate']}, gradients {point['gradients']}"
    )
    run = functools.partial(_run, point=point, options=options)
    return Case(name, torch.float32, tuple(given), run, functools.partial(_exact, point=point))


LATER_OPTIONS = ("decoupled_weight_decay", "foreach", "maximize")
"""Options that the optimizers of older releases of torch lack."""


def _options(point: Point) -> dict[str, Any]:
    kind, beta = point["kind"], point["betas"][1]
    common = {"lr": RATE, "weight_decay": point["decay"], "maximize": point["maximize"], "eps": point["epsilon"]}
    own: dict[str, dict[str, Any]] = {
        "RMSprop": {"alpha": beta, "momentum": point["momentum"], "centered": point["centered"]},
        "Adagrad": {"lr_decay": point["rate decay"], "initial_accumulator_value": 0.25},
        "Adadelta": {"rho": beta},
        "Adamax": {"betas": point["betas"]},
        "NAdam": {"betas": point["betas"], "momentum_decay": MOMENTUM_DECAY},
        "RAdam": {"betas": point["betas"]},
    }
    decoupled = {"decoupled_weight_decay": True} if point["decoupled"] else {}
    return {**common, **own[kind], **decoupled}


def _run(start: torch.Tensor, *gradients: torch.Tensor, point: Point, options: dict[str, Any]) -> dict[str, Any]:
    try:
        return optimizer_sampled_cases.run_steps(start, *gradients, point=point, options=options)
    except TypeError as error:
        if not any(f"unexpected keyword argument '{name}'" in str(error) for name in LATER_OPTIONS):
            raise
        raise NotImplementedError(str(error)) from error


def _exact(start: torch.Tensor, *gradients: torch.Tensor, point: Point) -> dict[str, Exact]:
    """Return the steps in float64 with their tolerances.

    In the code, `amplified` is how much a relative error of a moment may grow in the update, because of a difference or
    of the squares of earlier updates. `growth` is how much an error of a parameter may grow, because the decay times
    this error is added to the gradient.

    Gradients are at least 1/4, and so is the root of the mean of their squares. Therefore an update changes by at most
    8 times the change of the gradient. RMSprop does not correct its root in the first steps, which makes the factor 50,
    and 100 with momentum.
    """
    kind, decay, epsilon, (beta, beta2) = point["kind"], point["decay"], point["epsilon"], point["betas"]
    sign = -1.0 if point["maximize"] else 1.0
    p, limit, mean, squares, extra = start, *(torch.zeros_like(start) for _ in range(4))
    if kind == "Adagrad":
        squares = squares + 0.25
    growth = 1 + (100 if kind == "RMSprop" else 9) * RATE * decay
    product, found = 1.0, {}
    for number, part in enumerate(gradients, start=1):
        rate = RATE * (0.5 if point["rate"] != FIXED else 1.0) ** (number - 1)
        gradient = sign * part + (0.0 if point["decoupled"] else decay) * p
        amplified: Any = 1.0
        if kind == "Adagrad":
            squares = squares + gradient**2
            update = gradient / (squares.sqrt() + epsilon) / (1 + (number - 1) * point["rate decay"])
        elif kind == "Adadelta":
            squares = beta2 * squares + (1 - beta2) * gradient**2
            update = ((extra + epsilon) / (squares + epsilon)).sqrt() * gradient
            extra = beta2 * extra + (1 - beta2) * update**2
            amplified = number
        elif kind == "RMSprop":
            squares, mean = beta2 * squares + (1 - beta2) * gradient**2, beta2 * mean + (1 - beta2) * gradient
            variance = squares - mean**2 if point["centered"] else squares
            amplified = (squares + 2 * mean**2) / variance if point["centered"] else 1.0
            update = gradient / (variance.sqrt() + epsilon)
            extra = point["momentum"] * extra + update
            update = extra if point["momentum"] else update
        elif kind == "Adamax":
            mean = beta * mean + (1 - beta) * gradient
            squares = torch.maximum(beta2 * squares, gradient.abs() + epsilon)
            update = mean / squares / (1 - beta**number)
        elif kind == "NAdam":
            mean, squares = beta * mean + (1 - beta) * gradient, beta2 * squares + (1 - beta2) * gradient**2
            now, after = (beta * (1 - 0.5 * 0.96 ** (step * MOMENTUM_DECAY)) for step in (number, number + 1))
            product *= now
            root = (squares / (1 - beta2**number)).sqrt() + epsilon
            update = ((1 - now) / (1 - product) * gradient + after / (1 - product * after) * mean) / root
        else:
            mean, squares = beta * mean + (1 - beta) * gradient, beta2 * squares + (1 - beta2) * gradient**2
            update = mean / (1 - beta**number)
            longest, power = 2 / (1 - beta2) - 1, beta2**number
            length = longest - 2 * number * power / (1 - power)
            if length > 5:
                shorter, longer = (length - 4) * (length - 2) * longest, (longest - 4) * (longest - 2) * length
                update = update * math.sqrt(shorter / longer * (1 - power)) / (squares.sqrt() + epsilon)
        if point["decoupled"]:
            update = update + decay * p
        p = p - rate * update
        arithmetic = tolerances.adam(rate, amplified * update.abs(), number, 0.0)
        # decoupled decay multiplies the parameters before the step: one more rounding
        roundings = 2 if point["decoupled"] else 1
        limit = growth * limit + roundings * tolerances.rounding(p, torch.float32) + arithmetic
        found[f"step {number}"] = Exact(p, limit)
    return found


def of_halves(point: Point, seed: int) -> Case:
    """Build a case of SGD with half-precision parameters. All numbers, also momenta and differences, are integers times
    powers of two that need at most 8 bits. The steps are therefore exact."""
    point = {**point, "kind": "SGD", "rate": FIXED}
    shapes = optimizer_sampled_cases.shapes_of(point)
    count = sum(map(math.prod, shapes))
    given = [hashed_inputs.whole((count,), 30 * seed, 32)]
    given += [8 * hashed_inputs.whole((count,), 30 * seed + 1 + step, 2) for step in range(3)]
    options = {name: point[name] for name in ("momentum", "nesterov", "maximize")}
    run = functools.partial(_run_halves, point=point, options={"lr": 0.5, **options})
    shown = ", ".join(f"{name} {value}" for name, value in options.items() if value)
    name = (
        f"SGD {point['implementation']} of half precision, {len(shapes)} tensors {shapes[0]} to {shapes[-1]}, {shown}, "
        f"gradients {point['gradients']}"
    )
    dtype = point["dtype"]
    return Case(
        name, dtype, tuple(part.to(dtype) for part in given), run, functools.partial(_exact_halves, point=point)
    )


def _run_halves(
    start: torch.Tensor, *gradients: torch.Tensor, point: Point, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    if torch_fault_exclusions.uncomputed_results("SGD of half precision", start.device.type, point):
        point = {**point, "implementation": "loop"}
    return optimizer_sampled_cases.run_steps(start, *gradients, point=point, options=options)


def _exact_halves(start: torch.Tensor, *gradients: torch.Tensor, point: Point) -> dict[str, Exact]:
    p, buffer, found = start, torch.zeros_like(start), {}
    momentum = point["momentum"]
    for number, gradient in enumerate(gradients, start=1):
        gradient = -gradient if point["maximize"] else gradient
        buffer = momentum * buffer + gradient
        p = p - 0.5 * (gradient + momentum * buffer if point["nesterov"] else buffer)
        found[f"step {number}"] = without_rounding(p)
    return found


def scaled(point: Point, seed: int) -> Case:
    """Build a case of steps with GradScaler. A step with a bad element must leave the parameters unchanged and halve
    the scale; all other gradient elements of that step are 1."""
    point = {
        **{name: values[0] for name, values in SPACE.items()},
        **point,
        "capturable": False,
        "maximize": False,
        "late": False,
        "gradients": "contiguous",
        "rate": FIXED,
        "epsilon": 2.0**-6,
    }
    shapes = optimizer_sampled_cases.shapes_of(point)
    count = sum(map(math.prod, shapes))
    signs = hashed_inputs.signs(count, 30 * seed)
    given = [signs * (1 + hashed_inputs.uniform((count,), 30 * seed + 1))]
    for step in range(optimizer_sampled_cases.STEPS - (point["bad step"] is not None)):
        given.append(signs * (0.25 + 0.75 * hashed_inputs.uniform((count,), 30 * seed + 2 + step)))
    bad = (
        f"{point['bad']} in the {point['at']} element of step {point['bad step']}"
        if point["bad step"]
        else "all finite"
    )
    name = (
        f"{point['kind']} {point['implementation']} with scaled gradients, {len(shapes)} tensors {shapes[0]} to "
        f"{shapes[-1]}, {bad}, doubled after {point['interval']}"
    )
    run, exact = functools.partial(_run_scaled, point=point), functools.partial(_exact_scaled, point=point)
    return Case(name, torch.float32, tuple(given), run, exact)


def _scales(point: Point) -> list[float]:
    """Return the scale before each step and after the last one. It is doubled after a number of good steps, and halved
    after a bad one."""
    found, good = [1024.0], 0
    for number in range(1, optimizer_sampled_cases.STEPS + 1):
        is_bad = number == point["bad step"]
        good = 0 if is_bad else good + 1
        grown = good == point["interval"]
        found.append(found[-1] * (0.5 if is_bad else 2.0 if grown else 1.0))
        good = 0 if grown else good
    return found


def _run_scaled(start: torch.Tensor, *gradients: torch.Tensor, point: Point) -> dict[str, torch.Tensor]:
    scaler_class: Any = getattr(torch.amp, "GradScaler", None)  # missing before torch 2.3
    if scaler_class is None:
        raise NotImplementedError("no torch.amp.GradScaler")
    parameters = optimizer_sampled_cases.parameters_of(start, point)
    options = optimizer_sampled_cases.options_of(point)
    optimizer = getattr(torch.optim, point["kind"])(parameters, **options, **IMPLEMENTATIONS[point["implementation"]])
    scaler = scaler_class(start.device.type, init_scale=_scales(point)[0], growth_interval=point["interval"])
    one = torch.ones((), device=start.device)
    place = {"first": 0, "middle": len(start) // 2, "last": -1}[point["at"]]
    found, left = {}, iter(gradients)
    for number in range(1, optimizer_sampled_cases.STEPS + 1):
        is_bad = number == point["bad step"]
        gradient = (torch.ones_like(start) if is_bad else next(left)) * scaler.scale(one)
        if is_bad:
            gradient[place] = point["bad"]
        for parameter, part in zip(parameters, torch.split(gradient, [leaf.numel() for leaf in parameters])):
            parameter.grad = part.reshape(parameter.shape).clone()
        scaler.step(optimizer)
        scaler.update()
        found[f"step {number}"] = optimizer_sampled_cases.joined_parameters(parameters)
        found[f"scale after step {number}"] = scaler.scale(one)
    return found


def _exact_scaled(start: torch.Tensor, *gradients: torch.Tensor, point: Point) -> dict[str, Exact]:
    """Return the optimizer's steps without the bad step. Scales are powers of two, so unscaling the gradients
    is exact."""
    steps = list(optimizer_sampled_cases.exact_steps(start, *gradients, point=point).values())
    found, last = {}, without_rounding(start)
    for number, scale in enumerate(_scales(point)[1:], start=1):
        last = last if number == point["bad step"] else steps.pop(0)
        found[f"step {number}"] = last
        found[f"scale after step {number}"] = without_rounding(torch.tensor(scale, dtype=torch.float64))
    return found


OPERATIONS = sampled_operations()
