"""Fingerprints your own model, module by module, in the environment where it trains.

`envbuild diff` compares two fingerprints.

    from envbuild.selftest.model import fingerprint, first, write

    document = fingerprint(model, (batch,), reference=True)
    # The first module whose output exceeds its tolerance, or is not finite although its inputs are; None without faults
    print(first(document["ops"]))
    write(document, "a100.json")

Like the whole self-test, this module needs only the standard library and torch.
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

# The tolerance of a module's output. A module has no error formula, so the tolerance is estimated from SHAKES further
# float64 runs. In each of them, every element of the inputs and weights is multiplied by 1 + u or 1 - u, as hashed
# counters decide. u is the unit roundoff of the coarsest dtype that the module uses, but at least CHAIN: a float32 sum
# of some thousand terms, added one after the other, keeps 20 of its 24 bits. The tolerance of an element is MARGIN
# times the sum of two terms: the root mean square change of the output in these runs, and u times the element. Tests
# check this estimate; it is not a proof.
SHAKES, MARGIN, CHAIN = 2, 16, 2.0**-20

Inputs = Union[torch.Tensor, Sequence[Any], Mapping[str, Any]]
Pair = tuple[torch.Tensor, torch.Tensor]


def fingerprint(model: torch.nn.Module, inputs: Inputs, reference: bool = False) -> dict[str, Any]:
    """Run the model once, in eval mode and without gradients, and describe the output of every module.

    The result lists the modules in the order in which their calls end. A module comes after the modules inside it, so
    the first fault in the list is the innermost one. `inputs` is one tensor, a sequence of positional arguments, or a
    mapping of keyword arguments.

    With `reference`, each module also runs in float64 on the host, with exactly the inputs that it received. The
    difference is the error of this module alone, and is compared with a tolerance. The float64 copy takes 8 bytes of
    host memory for each parameter, and the additional runs take time.

    With and without `reference`, a non-finite output is a fault if the inputs are finite. If the float64 output is not
    finite either, the module's weights are the cause. An exception of the model is not caught.
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
    """A call of a module that has begun and not yet ended.

    `fed`: number of NaN or +inf elements in the inputs (-inf does not count, because attention masks contain it).
    `given`: float64 copies of the inputs, for the reference run; None without `reference`. `u`: the unit roundoff of
    the coarsest dtype that the module or a module inside it uses.
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
        given = changed([args, kwargs], wide) if self._wide else None  # copied before the call can overwrite them
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
        # Minus infinity in the output is accepted as a mask, unless the module has an infinite or NaN weight.
        masks = not exact or all(bool(torch.isfinite(weight).all()) for weight in self._wide[name].parameters())
        for index, (place, tensor) in enumerate(found):
            if len(exact) == len(found):
                seen = judged(tensor, call.fed, *exact[index], samples=SAMPLES, masks=masks)
            else:
                seen = observe(tensor, call.fed, SAMPLES)
            self.entries.append(_entry(name_of_call + place, module, tensor, seen, note))

    def _reference(self, name: str, call: _Call) -> tuple[list[Pair], str | None]:
        """Return the module's float64 outputs for the same inputs, each with its tolerance; and None.

        If the float64 run fails, the result is an empty list and the reason. Without `reference`, it is an empty list
        and None.
        """
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
    """Return each output in float64 with its tolerance, which the comment above SHAKES explains."""
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
    """Multiplies each element of a tensor by 1 + u or 1 - u; each tensor gets different signs."""

    def __init__(self, u: float, number: int) -> None:
        self._u, self._seed = u, 1000 * number

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor.clone()
        self._seed += 1
        return tensor * (1 + self._u * hashed_inputs.signs(tensor.numel(), self._seed).reshape(tensor.shape))


def _roundoff(dtypes: set[torch.dtype], tf32: bool = False) -> float:
    """Return the unit roundoff of the coarsest of the dtypes (of TF32 if `tf32` and one is float32); at least CHAIN."""
    units = (torch.finfo(dtype).eps / 2 for dtype in dtypes if dtype.is_floating_point)
    return max(*units, CHAIN, TF32 if tf32 and torch.float32 in dtypes else 0.0)


def _takes_tf32(module: torch.nn.Module, found: Iterable[torch.Tensor]) -> bool:
    """Return whether the module may use TF32.

    Convolutions and recurrent modules follow cuDNN's TF32 flag, which is on by default; other modules follow the flag
    for matrix products.
    """
    cudnn = (torch.nn.modules.conv._ConvNd, torch.nn.RNNBase)
    flag = "tf32.cudnn" if any(isinstance(inner, cudnn) for inner in module.modules()) else "tf32.matmul"
    return flag in flags() and any(tensor.is_cuda for tensor in found)


def _autocast() -> set[torch.dtype]:
    """Return the dtypes to which autocast converts, if the caller enabled autocast.

    The tensors at a module's boundary do not show them: autocast also converts inside a module.
    """
    if hasattr(torch, "get_autocast_dtype"):  # exists since torch 2.4
        return {torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)}
    found = {torch.get_autocast_gpu_dtype()} if torch.is_autocast_enabled() else set()
    return found | ({torch.get_autocast_cpu_dtype()} if torch.is_autocast_cpu_enabled() else set())


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host: floating-point numbers as float64, complex ones as complex128, others unchanged."""
    tensor = tensor.detach()
    dtype = torch.complex128 if tensor.is_complex() else torch.float64 if tensor.is_floating_point() else tensor.dtype
    return tensor.to("cpu", dtype, copy=True)


def changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with `change` applied to every tensor, also inside lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: changed(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [changed(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _wide_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Return a float64 copy of the model on the host.

    deepcopy gets the finished host copies of all tensors, so it makes no second copy on the device.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()):
            if isinstance(tensor, torch.nn.Parameter):
                copies[id(tensor)] = torch.nn.Parameter(wide(tensor), requires_grad=False)
            elif isinstance(tensor, torch.Tensor):
                copies[id(tensor)] = wide(tensor)
    return copy.deepcopy(model, copies).eval()
