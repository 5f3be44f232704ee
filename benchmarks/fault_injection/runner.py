"""Runs units in this process, with or without a fault, and determines the effect of the fault."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.numerics import (
    element_comparison,
    hashed_inputs,
    operation_case,
    reference_products,
    tensor_digests,
    tolerances,
)
from envbuild.selftest.probes.attention import (
    attention_backend_probes,
    attention_gradient_cases,
    attention_needle_cases,
)
from envbuild.selftest.probes.convolution import conv
from envbuild.selftest.probes.gemm import gemm_exact_and_accuracy
from envbuild.selftest.probes.hardware import memory
from envbuild.selftest.probes.linear_algebra import fft_and_linalg
from envbuild.selftest.probes.normalization import norm_fixed_cases
from envbuild.selftest.probes.training import small_gpt, train_step

from .injector import InjectedContext, Injector, Shot, Site
from .records import MASKED, PARTIAL, STOPPED, WHOLE
from .units import Unit

# The functions that compute inputs and exact results. Callers receive copies of inputs, because some callers write to
# them.
_COPIED: tuple[Any, ...] = (
    hashed_inputs.hashes,
    hashed_inputs.ternary,
    hashed_inputs.signs,
    hashed_inputs.whole,
    hashed_inputs.uniform,
    hashed_inputs.signed,
)
_REMEMBERED: tuple[Any, ...] = (
    *(
        reference_products.product,
        memory.words_of,
        gemm_exact_and_accuracy.integers,
        gemm_exact_and_accuracy.references,
        small_gpt.tokens,
    ),
    *(
        attention_backend_probes.exact_attention,
        attention_backend_probes.mean_of_keys,
        attention_gradient_cases.exact_gradients,
        norm_fixed_cases.exact_norm,
        conv.reference,
        conv.integer_inputs,
    ),
    *(
        attention_backend_probes.attention_inputs,
        attention_gradient_cases.gradient_inputs,
        attention_needle_cases.make_needle,
        norm_fixed_cases.norm_inputs,
    ),
)
# Training writes to the results of the first two functions; the third multiplies results of a faulty operator, in
# float64.
_ON_HOST: tuple[Any, ...] = (train_step.model, small_gpt.parameters, fft_and_linalg._times)

Compare = Callable[..., element_comparison.Worst]
_digest = tensor_digests.raw_digest  # the original function, which Runner replaces


@dataclass(frozen=True)
class Result:
    """Values that a probe compared or computed, and by how much rounding may change each value; None: by nothing."""

    values: torch.Tensor
    allowed: torch.Tensor | None = None


@dataclass
class Observed:
    """The observations of one run of a unit: its outputs, its results, and what the probe reported."""

    sites: list[Site] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    error: str | None = None
    skipped: str | None = None

    @property
    def detected(self) -> bool:
        return bool(self.faults) or self.error is not None


@dataclass(frozen=True)
class Effect:
    """The effect of a fault: one of records.OUTCOMES, whether the probe reported it, and how many elements changed.
    `units`: the largest change of a result, in units in the last place of its largest element; a change to NaN or to a
    different integer counts as infinite."""

    outcome: str
    detected: bool
    changed: int = 0
    count: int = 0
    units: float = 0.0


class Runner:
    """Runs units. Within its `with` block, inputs and references are computed only once, and results are kept.

    `compare`: the comparison that the probes use. With a broken one, the campaign measures what it misses.

    While `learning`, references are stored under the bytes of their inputs. So if a fault has changed the inputs, the
    reference is computed again.
    """

    job: JobDocument  # used by the next runs

    def __init__(self, job: JobDocument, compare: Compare = element_comparison.compare) -> None:
        self.job = job
        self.learning = True
        self._compare = compare
        self._known: dict[Any, Any] = {}
        self._injector: Injector | None = None
        self._results: list[Result] = []
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Runner:
        raw_digest = tensor_digests.raw_digest
        self._replace(element_comparison.compare, self._comparing(element_comparison.compare))
        self._replace(raw_digest, self._digesting(raw_digest))
        for function in _COPIED:
            self._replace(function, self._remembering(function, copied=True))
        for function in _REMEMBERED:
            self._replace(function, self._remembering(function))
        for function in _ON_HOST:
            self._replace(function, self._on_host(function))
        self._replace(train_step.train, self._training(train_step.train))
        self._set(operation_case.Case, "expected", self._expecting(operation_case.Case.expected))
        trained = conv.Trained.of
        self._set(conv.Trained, "of", staticmethod(self._remembering(trained)))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def judged(self, unit: Unit) -> list[str]:
        """Return the probe's report of the unit without a fault and without observing operators."""
        self._injector, self._results = None, []
        context = Context(self.job)
        try:
            unit.run(context)
        except Exception as raised:
            return [*(fault.reason for fault in context.faults), f"{type(raised).__name__}: {raised}"]
        return [fault.reason for fault in context.faults]

    def run(self, unit: Unit, shot: Shot | None = None) -> Observed:
        """Run a unit once."""
        self._injector, self._results = Injector(shot, unit.results), []
        context = InjectedContext(self.job, self._injector)
        error = skipped = None
        try:
            unit.run(context)
        except Skip as reason:
            skipped = str(reason)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}".splitlines()[0][:200]
        faults = [fault.reason for fault in context.faults]
        results = [*self._results, *map(Result, self._injector.made)]
        return Observed(self._injector.sites, results, faults, error, skipped)

    def learned(self, unit: Unit) -> Observed | None:
        """Run a unit for the first time; later runs reuse what the first run computed. None if torch or the device
        lacks an operation that the unit calls. Raises ValueError if the unit ends with an error."""
        self.learning = True
        first = self.run(unit)
        self.learning = False
        if first.error is not None:
            raise ValueError(f"{unit.name}: {first.error}")
        return first if first.skipped is None and first.sites else None

    def clean(self, unit: Unit) -> Observed | None:
        """Run without a fault; None as in `learned`. Raises ValueError if the probe reports anything."""
        first = self.learned(unit)
        if first is None:
            return None
        second = self.run(unit)
        for run in (first, second):
            if run.detected:
                raise ValueError(f"{unit.name}: reported without a fault: {run.faults or run.error}")
        return second

    def _replace(self, function: Any, other: Any) -> None:
        """Replace the function in every module of the self-test that has it, under any name."""
        for name, module in list(sys.modules.items()):
            if name.startswith("envbuild.selftest"):
                for attribute, value in list(vars(module).items()):
                    if value is function:
                        self._set(module, attribute, other)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner)[name]
        self._undo.callback(setattr, owner, name, before)
        setattr(owner, name, value)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        with self._injector.on_host() if self._injector else contextlib.nullcontext():
            yield

    def _on_host(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._aside():
                return function(*args, **kwargs)

        return call

    def _remembering(self, function: Callable[..., Any], copied: bool = False) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._aside():
                key = (function.__module__, function.__qualname__, _key(args), _key(sorted(kwargs.items())))
                if key in self._known:
                    found = self._known[key]
                else:
                    found = function(*args, **kwargs)
                    if self.learning:
                        self._known[key] = found
                return found.clone() if copied else found

        return call

    def _expecting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def expected(case: operation_case.Case) -> Any:
            if id(case) not in self._known:
                self._known[id(case)] = (
                    case,
                    function(case),
                )  # keeps the case alive, so that no other object gets its id
            return self._known[id(case)][1]

        return expected

    def _training(self, function: Callable[..., Any]) -> Callable[..., Any]:
        remembered = self._remembering(function)

        @functools.wraps(function)
        def call(device: torch.device, dtype: torch.dtype) -> Any:
            return remembered(device, dtype) if dtype == torch.float64 else function(device, dtype)

        return call

    def _comparing(self, right: Compare) -> Compare:
        def compare(
            got: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | None = None
        ) -> element_comparison.Worst:
            with self._aside():
                values = got.detach().clone()
                allowed = None
                if bound is not None and self._injector is not None and self._injector.shot is None:
                    allowed = _allowed(values, bound, right(got, expected, bound))
                self._results.append(Result(values, allowed))
                return self._compare(got, expected, bound)

        return compare

    def _digesting(self, function: Callable[..., str]) -> Callable[..., str]:
        def raw_digest(*tensors: torch.Tensor) -> str:
            with self._aside():
                self._results += [Result(values.detach().clone()) for values in tensors]
                return function(*tensors)

        return raw_digest


def _allowed(values: torch.Tensor, bound: torch.Tensor, worst: element_comparison.Worst) -> torch.Tensor | None:
    """Return the largest error of a run without a fault, relative to the tolerance, or one rounding of the value,
    whichever is larger."""
    if not worst.bound:
        return None
    dtype = values.dtype
    unit = tolerances.unit_roundoff(dtype) if dtype.is_floating_point else 0.0
    share = worst.error / worst.bound
    limit = share * bound.to(torch.float64).expand(values.shape)
    return torch.maximum(limit, unit * values.to(torch.float64).abs())


def effect(clean: Observed, faulty: Observed, dtype: torch.dtype = torch.float64) -> Effect:
    """Return the effect of a fault in a number of this dtype. A probe that ended early with an error has no results."""
    if faulty.error is not None or faulty.skipped is not None:
        return Effect(STOPPED, faulty.detected)
    changed, count, units = 0, 0, 0.0
    whole = False
    for before, after in zip(clean.results, faulty.results, strict=False):
        different = _different(before, after)
        number = int(different.sum())
        whole |= bool(number) and number == different.numel()
        changed, count = changed + number, count + different.numel()
        if number:
            units = max(units, _units(before.values, after.values, dtype))
    outcome = WHOLE if whole else PARTIAL if changed else MASKED
    return Effect(outcome, faulty.detected, changed, count, units)


def _units(before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the largest change of a value, in the units of Effect. The units are those of `dtype`, if the values have
    a finer dtype."""
    if before.shape != after.shape or not before.is_floating_point():
        return math.inf
    coarsest = max(one.eps for one in map(torch.finfo, (before.dtype, dtype)))
    old, new = before.to(torch.float64), after.to(torch.float64)
    moved = (new - old).abs().masked_fill(new == old, 0.0)
    largest = float(old[old.isfinite()].abs().amax()) if bool(old.isfinite().any()) else 0.0
    if bool(moved.isnan().any()) or not largest:
        return math.inf
    return float(moved.amax()) / (coarsest * largest)


def _different(before: Result, after: Result) -> torch.Tensor:
    """Return which elements a fault changed by more than rounding may change them; all elements if the shapes
    differ."""
    if before.values.shape != after.values.shape or before.values.dtype != after.values.dtype:
        return torch.ones(before.values.shape, dtype=torch.bool)
    if before.allowed is None:
        return _bits(before.values) != _bits(after.values)
    old, new = (result.values.to(torch.float64) for result in (before, after))
    return ~(((new - old).abs() <= before.allowed) | (new == old))


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of values, for a comparison in which NaN equals NaN. 0 and -0 get the same bits, because the
    probes treat them as equal."""
    if not values.is_floating_point() or values.itemsize == 1:
        return values.view(torch.uint8) if values.dtype != torch.bool and values.itemsize == 1 else values
    return (values + 0.0).contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])


def _key(value: Any) -> Any:
    """Return the key under which an argument is stored for later calls."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), _digest(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, *(_key(getattr(value, part.name)) for part in dataclasses.fields(value)))
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    return value
