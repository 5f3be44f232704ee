"""Injects a fault into one operation of a probe, and observes its effect.

A probe computes on the device in blocks `with context.step(...)`. The injector observes every aten operator in such a
block, except operators that compute nothing (views, and `empty`), and those that compute inputs and references
(`on_host`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context, ProbeStep, Refusal

from . import model

_COMPUTE_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "resize_"}


@dataclass(frozen=True)
class Site:
    """An output of an operator. `number`: its position among all outputs of the unit."""

    number: int
    operator: str
    dtype: torch.dtype
    count: int


@dataclass(frozen=True)
class Shot:
    """A fault, and the number of the output that it changes."""

    number: int
    fault: model.Fault


class Injector(TorchDispatchMode):
    """Observes the operators of a step, counts their outputs, and changes one output as `shot` says. `results`: the
    operators whose outputs count as results, even if the probe does not compare them."""

    def __init__(self, shot: Shot | None = None, results: Sequence[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sites: list[Site] = []
        self.made: list[torch.Tensor] = []
        self.hit: str | None = None
        self._kept: list[torch.Tensor] = []
        self._count = 0
        self.shot = shot
        self._results = frozenset(results)
        self._host = 0

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Pause the observation while the host computes inputs and references for the probe."""
        self._host += 1
        try:
            yield
        finally:
            self._host -= 1

    def settle(self) -> None:
        """At the end of a step, copy the step's results, because later operators may write to some of these tensors."""
        self.made += [values.detach().clone() for values in self._kept]
        self._kept.clear()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _called(operator, args, kwargs)
        name = operator._schema.name.partition("::")[2]
        if not self._host and name not in _COMPUTE_NOTHING:
            for values in _written(operator._schema, args, kwargs, result):
                self._see(name, values)
        return result

    def _see(self, name: str, values: torch.Tensor) -> None:
        number, self._count = self._count, self._count + 1
        if self.shot is None:
            plain = torch.view_as_real(values) if values.is_complex() else values
            self.sites.append(Site(number, name, plain.dtype, plain.numel()))
        elif number == self.shot.number:
            self.hit = name
            _strike(self.shot.fault, values)
        if name in self._results:
            self._kept.append(values)


def _strike(fault: model.Fault, values: torch.Tensor) -> None:
    plain = torch.view_as_real(values) if values.is_complex() else values
    plain.copy_(model.apply(fault, plain.reshape(-1)).view(plain.shape))


def _written(schema: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Iterator[torch.Tensor]:
    """Return the tensors that an operator computed: new ones, and arguments that it wrote to."""
    results = result if isinstance(result, tuple) else (result,)
    for returned, value in zip(schema.returns, results, strict=False):
        if returned.alias_info is None:
            yield from _tensors(value)
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[place] if place < len(args) else kwargs.get(argument.name))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.numel():
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


# On the CPU, torch multiplies fp8 element by element, which is slow, so known results are not computed again.
_SLOW = {"_scaled_mm"}
_slow_results: dict[Any, torch.Tensor] = {}


def _called(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if operator._schema.name.partition("::")[2] not in _SLOW:
        return operator(*args, **kwargs)
    given = (*args, *(kwargs[name] for name in sorted(kwargs)))
    key = tuple(part.float().numpy().tobytes() if torch.is_tensor(part) else part for part in given)
    if key not in _slow_results:
        _slow_results[key] = operator(*args, **kwargs)
    return _slow_results[key].clone()


class InjectedContext(Context):
    """A probe's context that lets an injector observe its steps."""

    def __init__(self, job: JobDocument, injector: Injector) -> None:
        super().__init__(job)
        self.injector = injector

    def step(self, name: str, may_refuse: Refusal | None = None) -> ProbeStep:
        step = super().step(name, may_refuse)
        return _SeenStep(step, self.injector)


class _SeenStep(ProbeStep):
    """A step during which the injector is active."""

    def __init__(self, step: ProbeStep, injector: Injector) -> None:
        self.seconds, self.refused = 0.0, False
        self._step, self._injector = step, injector

    def __enter__(self) -> ProbeStep:
        self._step.__enter__()
        self._injector.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._injector.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._injector.settle()
        self._step.__exit__(kind, error, trace)
        self.seconds, self.refused = self._step.seconds, self._step.refused
        return self.refused
