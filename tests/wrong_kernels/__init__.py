"""Wrong kernels: operations of torch that give wrong results in some cases, as a faulty library or GPU would.

They measure the self-test. Two authors wrote them, who saw neither the probes nor each other's kernels: the probes'
cases are developed against those in `known/` and scored on those in `unseen/`. score.py runs the self-test with each.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Call = Callable[..., Any]
Results = Sequence[torch.Tensor]

_WIDE = (torch.float64, torch.complex128)

KERNELS: dict[str, WrongKernel] = {}

_state = threading.local()


@dataclass(frozen=True)
class WrongKernel:
    """A fault: the function that replaces an operation, a call whose result the fault makes wrong, and a call whose
    result stays right.

    `fault(call, *args, **kwargs)` gives the wrong result; `call` is the right operation. `operators` names operators
    under their name in aten ("mm", "convolution_backward", "_softmax"), whose inputs need no gradient any more, in each
    overload: `call.overload` says which; `functions` names attributes of modules and classes as Python calls them
    ("torch.nn.functional.scaled_dot_product_attention"), whose results autograd still differentiates.
    `beyond`: why a self-test of a minute cannot be asked to find it, if so.
    """

    name: str
    operation: str
    sentence: str
    fault: Call
    wrong: Callable[[], Results]
    right: Callable[[], Results]
    operators: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    beyond: str = ""


def wrong_kernel(
    operation: str,
    *,
    wrong: Callable[[], Results],
    right: Callable[[], Results],
    operators: Sequence[str] = (),
    functions: Sequence[str] = (),
    beyond: str = "",
) -> Callable[[Call], Call]:
    """Register the function below as a fault, under the name of its half (`known` or `unseen`) and the function's name;
    the function's docstring describes the fault."""

    def register(fault: Call) -> Call:
        half = fault.__module__.split(".")[1]
        name = f"{half}/{fault.__name__.replace('_', '-')}"
        if name in KERNELS:
            raise ValueError(f"two wrong kernels are named {name}")
        sentence = " ".join((fault.__doc__ or "").split())
        KERNELS[name] = WrongKernel(
            name, operation, sentence, fault, wrong, right, tuple(operators), tuple(functions), beyond
        )
        return fault

    return register


@contextlib.contextmanager
def installed(kernel: WrongKernel) -> Iterator[None]:
    """Calls of the operation go through the fault, in this process and in processes forked from it.

    Calls with a tensor of float64 or complex128, or that give one, stay right: references are computed so, on the same
    processor. Under inference_mode operators are seen as they are called (linear, conv2d), not what they consist of.
    """
    before = {}
    for path in kernel.functions:
        owner, name = _owner(path)
        before[path] = getattr(owner, name)
        setattr(owner, name, _replaced(kernel.fault, before[path]))
    try:
        with _Operators(kernel) if kernel.operators else contextlib.nullcontext():
            yield
    finally:
        for path, original in before.items():
            owner, name = _owner(path)
            setattr(owner, name, original)


@contextlib.contextmanager
def right() -> Iterator[None]:
    """In this context, the installed fault does not change calls of this thread, and the dispatch mode costs no
    time."""
    before, _state.right = getattr(_state, "right", False), True
    try:
        with torch._C._DisableTorchDispatch():
            yield
    finally:
        _state.right = before


class _Operators(TorchDispatchMode):
    def __init__(self, kernel: WrongKernel) -> None:
        super().__init__()
        self._kernel = kernel
        self._faulty: dict[Any, bool] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        faulty = self._faulty.get(operator)
        if faulty is None:
            faulty = operator._schema.name.partition("::")[2] in self._kernel.operators
            self._faulty[operator] = faulty
        if not faulty or _is_reference(args, kwargs):
            return operator(*args, **kwargs)
        return self._kernel.fault(_Call(operator), *args, **kwargs)


class _Call:
    """The call of a right operation, which the fault may also call with other arguments of the same kinds; the
    operation's name and overload in aten."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self.name: str = operator._schema.name.partition("::")[2]
        self.overload: str = operator._overloadname

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._operator(*args, **kwargs)


def _replaced(fault: Call, original: Call) -> Call:
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(_state, "right", False) or _is_reference(args, kwargs):
            return original(*args, **kwargs)
        return fault(original, *args, **kwargs)

    return call


def _is_reference(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("dtype") in _WIDE or any(value in _WIDE for value in args if isinstance(value, torch.dtype)):
        return True
    return any(_is_wide(value) for value in (*args, *kwargs.values()))


def _is_wide(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype in _WIDE
    return isinstance(value, (list, tuple)) and any(_is_wide(item) for item in value)


def _owner(path: str) -> tuple[Any, str]:
    """Return the module or class that has an attribute, and the attribute's name."""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise ValueError(f"{path} is not in a module that can be imported")
