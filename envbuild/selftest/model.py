"""Fingerprints your own model, module by module, in the environment where it trains; `envbuild diff` reads the result.

    from envbuild.selftest.model import fingerprint, first, write

    document = fingerprint(model, (batch,), reference=True)
    # None, or the first module whose output exceeds its tolerance, or is non-finite although its inputs are finite
    print(first(document["ops"]))
    write(document, "a100.json")

Needs only the standard library and torch, like the whole self-test.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Union

import torch

from envbuild.selftest.harness.probe_context import dtype_name
from envbuild.selftest.numerics import hashed_inputs
from envbuild.selftest.numerics.fingerprint_document import MODEL, document, flags, write
from envbuild.selftest.numerics.output_statistics import first_fault as first
from envbuild.selftest.numerics.output_statistics import judged, not_finite, observe, tensors
from envbuild.selftest.numerics.tensor_digests import raw_digest
from envbuild.selftest.numerics.tolerances import TF32

__all__ = ["fingerprint", "first", "write"]

SAMPLES = 64
ROOT = "(model)"

# The bound for modules, for which there is no error formula: every input and weight is changed by one rounding, up or
# down as hashed counters decide, SHAKES times. The bound is MARGIN times the sum of the root mean square change of the
# float64 result and one rounding of the result. CHAIN: a float32 sum of some thousand terms in one chain keeps 20 of
# its 24 bits. This is an estimate, checked by tests; not a proof.
SHAKES, MARGIN, CHAIN = 2, 16, 2.0**-20

Inputs = Union[torch.Tensor, Sequence[Any], Mapping[str, Any]]
Pair = tuple[torch.Tensor, torch.Tensor]


def fingerprint(model: torch.nn.Module, inputs: Inputs, reference: bool = False) -> dict[str, Any]:
    """Run the model once, in eval mode and without gradients, and describe the output of every module.

    Modules are in the order in which they end: a module comes after those inside it, so the first fault is the
    innermost.
    `inputs`: one tensor, the positional arguments, or a mapping of keyword arguments. With `reference` each module also
    runs in float64 on the host, with the exact inputs it received: the error is then its own, and is compared with a
    bound. That takes 8 bytes of host memory for each parameter, and time. With or without it, a module whose output is
    not finite although its inputs are is a fault; if float64 is not finite either, the cause is its weights. Raises
    what the model raises.
    """
    given = [inputs] if isinstance(inputs, torch.Tensor) else [] if isinstance(inputs, Mapping) else list(inputs)
    named = dict(inputs) if isinstance(inputs, Mapping) else {}
    training = [module for module in model.modules() if module.training]
    recorder = _Recorder(model, reference)
    try:
        model.eval()
        with torch.no_grad(), recorder:
            model(*given, **named)
    finally:
        for module in training:
            module.training = True
    device = next((tensor.device for _, tensor in tensors([given, named])), torch.device("cpu"))
    digest = raw_digest(*(tensor for _, tensor in tensors([given, named])))
    return document(MODEL, digest, device, recorder.entries)


@dataclass
class _Call:
    """A running call of a module.

    `fed`: number of NaN or +inf elements in the inputs (-inf does not count, because masks contain it). `given`: the
    inputs, for the reference. `u`: the unit roundoff of the coarsest dtype used by the module and the modules inside
    it.
    """

    fed: int
    given: Any
    u: float


class _Recorder:
    """Context manager that records each call of every module of the model."""

    def __init__(self, model: torch.nn.Module, reference: bool) -> None:
        self.entries: list[dict[str, Any]] = []
        self._modules = {name or ROOT: module for name, module in model.named_modules()}
        wide = _wide_copy(model) if reference else None
        self._wide = {name or ROOT: module for name, module in wide.named_modules()} if wide else {}
        self._count: dict[str, int] = {}
        self._calls: list[_Call] = []
        self._handles: list[Any] = []

    def __enter__(self) -> _Recorder:
        for name, module in self._modules.items():
            after = functools.partial(self._after, name)
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        found = [tensor for _, tensor in tensors([args, kwargs])]
        given = changed([args, kwargs], wide) if self._wide else None  # copied now: the module may overwrite them
        u = _roundoff({tensor.dtype for tensor in (*found, *module.parameters())}, _takes_tf32(module, found))
        self._calls.append(_Call(not_finite(found), given, u))

    def _after(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._calls.pop()
        found = list(_outputs(output))
        call.u = max(call.u, _roundoff({tensor.dtype for _, tensor in found} | _autocast()))
        if self._calls:
            self._calls[-1].u = max(self._calls[-1].u, call.u)
        self._count[name] = self._count.get(name, 0) + 1
        name_of_call = f"{name}#{self._count[name]}" if self._count[name] > 1 else name
        exact, note = self._reference(name, call)
        # Minus infinity counts as a mask, unless an infinite weight caused it.
        masks = not exact or all(bool(torch.isfinite(weight).all()) for weight in self._wide[name].parameters())
        for index, (place, tensor) in enumerate(found):
            if len(exact) == len(found):
                seen = judged(tensor, call.fed, *exact[index], samples=SAMPLES, masks=masks)
            else:
                seen = observe(tensor, call.fed, SAMPLES)
            self.entries.append(_entry(name_of_call + place, module, tensor, seen, note))

    def _reference(self, name: str, call: _Call) -> tuple[list[Pair], str | None]:
        """The module's float64 outputs for the same inputs, with their bounds; or the reason why there are none."""
        if not self._wide:
            return [], None
        try:
            return _expected(self._wide[name], call.given, call.u), None
        except Exception as error:
            lines = str(error).strip().splitlines() or ["no message"]
            return [], f"no reference: {type(error).__name__}: {lines[0][:300]}"


def _entry(
    name: str, module: torch.nn.Module, tensor: torch.Tensor, seen: dict[str, Any], note: str | None
) -> dict[str, Any]:
    return {
        "id": name,
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "exact": False,
        "backend": f"{tensor.device.type}:{type(module).__name__}",
        "flags": flags(),
        "note": note,
        "golden": None,
        "teacher": None,
        "free": dict(seen, drift=None),
    }


def _outputs(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for place, tensor in tensors(value):
        yield place, torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _expected(module: torch.nn.Module, given: Any, u: float) -> list[Pair]:
    """Each output in float64 with its bound from SHAKES, MARGIN and `u`."""
    args, kwargs = given
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        exact = _numbers(module(*changed(args, torch.clone), **changed(kwargs, torch.clone)))
        moved = [torch.zeros_like(tensor) for tensor in exact]
        for number in range(SHAKES):
            shake = _Shake(u, number)
            weights = {name: shake(weight) for name, weight in module.named_parameters()}
            again = torch.func.functional_call(module, weights, changed(args, shake), changed(kwargs, shake))
            for total, one, other in zip(moved, exact, _numbers(again)):
                change = torch.where(torch.isfinite(other - one), other - one, torch.zeros_like(one))
                total += change.square() / SHAKES
    return [(one, MARGIN * (u * one.abs() + total.mean().sqrt())) for one, total in zip(exact, moved)]


def _numbers(output: Any) -> list[torch.Tensor]:
    return [tensor.to(torch.float64) for _, tensor in _outputs(output)]


class _Shake:
    """Multiplies each number by 1 + u or 1 - u, with different signs for each tensor."""

    def __init__(self, u: float, number: int) -> None:
        self._u, self._seed = u, 1000 * number

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor.clone()
        self._seed += 1
        return tensor * (1 + self._u * hashed_inputs.signs(tensor.numel(), self._seed).reshape(tensor.shape))


def _roundoff(dtypes: set[torch.dtype], tf32: bool = False) -> float:
    """The unit roundoff of the coarsest dtype; at least CHAIN."""
    units = (torch.finfo(dtype).eps / 2 for dtype in dtypes if dtype.is_floating_point)
    return max(*units, CHAIN, TF32 if tf32 and torch.float32 in dtypes else 0.0)


def _takes_tf32(module: torch.nn.Module, found: Iterable[torch.Tensor]) -> bool:
    """Whether the module may use TF32. cuDNN has its own flag for convolutions and recurrent modules, on by default."""
    cudnn = (torch.nn.modules.conv._ConvNd, torch.nn.RNNBase)
    flag = "tf32.cudnn" if any(isinstance(inner, cudnn) for inner in module.modules()) else "tf32.matmul"
    return flag in flags() and any(tensor.is_cuda for tensor in found)


def _autocast() -> set[torch.dtype]:
    """The dtypes of autocast, if the caller enabled it: operations between modules do not reveal them."""
    if hasattr(torch, "get_autocast_dtype"):  # from torch 2.4 on
        return {torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)}
    found = {torch.get_autocast_gpu_dtype()} if torch.is_autocast_enabled() else set()
    return found | ({torch.get_autocast_cpu_dtype()} if torch.is_autocast_cpu_enabled() else set())


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, with floating-point numbers in float64."""
    tensor = tensor.detach()
    dtype = torch.complex128 if tensor.is_complex() else torch.float64 if tensor.is_floating_point() else tensor.dtype
    return tensor.to("cpu", dtype, copy=True)


def changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to every tensor inside lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: changed(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [changed(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _wide_copy(model: torch.nn.Module) -> torch.nn.Module:
    """The model in float64 on the host. deepcopy receives each tensor's copy, so the device holds no duplicates."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()):
            if isinstance(tensor, torch.nn.Parameter):
                copies[id(tensor)] = torch.nn.Parameter(wide(tensor), requires_grad=False)
            elif isinstance(tensor, torch.Tensor):
                copies[id(tensor)] = wide(tensor)
    return copy.deepcopy(model, copies).eval()
