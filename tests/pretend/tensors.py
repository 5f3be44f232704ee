"""Tensors of the simulated GPU: Python sees `cuda:0`, torch's C++ sees the host."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .arithmetic import compute
from .clock import Clock
from .gpus import GPUS, Gpu
from .memory import Memory

DEVICE = torch.device("cuda", 0)
# Operations whose tensors may be on the host or the GPU: explicit copies, and indices, which CUDA accepts from the
# host.
_COPIES = ("aten::copy_", "aten::_to_copy")
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")


@dataclass
class Pretended:
    """The GPU that this process and its forks simulate. `clock`: the time that the simulation takes; `graph`: the graph
    that is being captured (graphs.Graph)."""

    gpu: Gpu
    memory: Memory = field(init=False)
    clock: Clock = field(default_factory=Clock)
    graph: Any = None

    def __post_init__(self) -> None:
        self.memory = Memory(self.gpu.memory)


here = Pretended(GPUS["h100"])  # runtime.install replaces it
_host_tensor = torch.tensor


class GpuTensor(torch.Tensor):
    """A tensor on the simulated GPU. `held`: its values, on the host. Every operation on it calls
    __torch_dispatch__."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> GpuTensor:
        found: GpuTensor = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device="cpu"
        )
        return found

    def __init__(self, held: torch.Tensor) -> None:
        here.memory.count(held)
        self.held = held

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype)
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        source = self if dtype in (None, self.dtype) else torch.ops.aten.to.dtype(self, dtype)
        if device is not None and device.type != "cuda":
            return _Download.apply(source)
        return source.clone() if copy and source is self else source

    def cpu(self, *_: Any) -> torch.Tensor:
        return _Download.apply(self)

    def cuda(self, *_: Any, **__: Any) -> torch.Tensor:
        return self

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def data_ptr(self) -> int:
        raise RuntimeError("a tensor of the simulated GPU has no address")

    def __repr__(self, **_: Any) -> str:
        return f"{self.held!r} on {DEVICE}"

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with here.clock:
            return _run(operation, args, kwargs or {})


class _OnDevice(TorchDispatchMode):
    """While this context is active, tensors that are created on `cuda` or moved to it become GpuTensors."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with here.clock:
            kwargs = kwargs or {}
            if GpuTensor in types or _is_cuda(kwargs.get("device")):
                return _run(operation, args, kwargs)
            with here.clock.stopped():
                return operation(*args, **kwargs)


class _Download(torch.autograd.Function):
    """Copies from the GPU to the host, and the gradient back."""

    @staticmethod
    def forward(ctx: Any, source: GpuTensor) -> torch.Tensor:
        if here.graph is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return source.held.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].to(DEVICE)


class _Upload(torch.autograd.Function):
    """Copies from the host to the GPU, and the gradient back."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor) -> torch.Tensor:
        return GpuTensor(source.detach().resolve_conj().clone())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].cpu()


def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replaces torch.Tensor.to for tensors of the host: torch's C++ code would ask CUDA which device a plain "cuda"
    means."""
    if args and isinstance(args[0], GpuTensor):
        args = (DEVICE, args[0].dtype, *args[1:])
    args = tuple(DEVICE if isinstance(arg, (str, torch.device)) and _is_cuda(arg) else arg for arg in args)
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = DEVICE
    with _OnDevice() if DEVICE in (*args, kwargs.get("device")) else contextlib.nullcontext():
        return torch._C.TensorBase.to(tensor, *args, **kwargs)


def factory(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Replaces a function of torch that creates a tensor. A dispatch mode that is always entered would work too, but
    add about 10 µs to every operation of the host."""

    @functools.wraps(function)
    def made(*args: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if device is None:
            return function(*args, **options)
        with _OnDevice() if _is_cuda(device) else contextlib.nullcontext():
            return function(*args, device=device, **options)

    return made


def tensor(data: Any, *, device: Any = None, requires_grad: bool = False, **options: Any) -> torch.Tensor:
    """Replaces torch.tensor, for the same reason as `to`."""
    made = _host_tensor(data, **options)
    return (made if device is None else made.to(device)).requires_grad_(requires_grad)


def simulated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count the time of this function as time of the simulation, not of the host."""

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with here.clock:
            return function(*args, **kwargs)

    return counted


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces a function that a GpuTensor cannot pass through: for example, because torch's C++ code creates tensors
    on the device that it sees, which is the host, or needs a lazy conjugate. The function and its gradient are computed
    on the host."""

    @functools.wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(leaf, GpuTensor) for leaf in tree_leaves((args, kwargs))):
            return function(*args, **kwargs)
        with here.clock:
            plain_args, plain = tree_map(lambda x: x.cpu() if isinstance(x, GpuTensor) else x, (args, kwargs))
            found = function(*plain_args, **plain)
            return tuple(map(_Upload.apply, found)) if isinstance(found, tuple) else _Upload.apply(found)

    return computed


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _run(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = operation._schema.name
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    strangers = [leaf for leaf in leaves if not isinstance(leaf, GpuTensor) and leaf.dim()]
    if strangers and len(strangers) < len(leaves) and name not in (*_COPIES, *_INDEXING):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"(when checking {name})"
        )
    if name == "aten::empty" and kwargs.get("device") is not None:
        return GpuTensor(here.memory.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype()))
    plain_args, plain = tree_map(lambda x: x.held if isinstance(x, GpuTensor) else x, (tuple(args), dict(kwargs)))
    if _is_cuda(plain.get("device")):
        plain["device"] = torch.device("cpu")
    # A copy from the host, including its conversion, is the host's work on a real GPU too.
    with here.clock.stopped() if strangers and name in _COPIES else contextlib.nullcontext(), _lazy_views():
        result = compute(operation, plain_args, plain, here.gpu.capability)
    if here.graph is not None:
        if strangers:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        here.graph.keep(operation, plain_args, plain, result)
    written = _written(operation, args, kwargs)
    return tree_map(_lifted, result) if written is None else written


def _lazy_views() -> Any:
    """While this context is active, torch resolves the lazy conjugates that an operation makes inside (pinv of complex
    matrices). In a __torch_dispatch__ torch skips these keys, which come before Python's."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _lifted(value: Any) -> Any:
    """Compute a lazy conjugate immediately: torch does not see the flag behind a GpuTensor."""
    return GpuTensor(value.resolve_conj()) if type(value) is torch.Tensor else value


def _written(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments that an operation both writes to and returns (in place, or as `out`); None for any other
    operation."""
    places = dict(zip((argument.name for argument in operation._schema.arguments), args, strict=False))
    found = [
        {**places, **kwargs}[argument.name]
        for argument in operation._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        if {**places, **kwargs}.get(argument.name) is not None
    ]
    if not found or not operation._schema.returns:
        return None
    return found[0] if len(found) == 1 else tuple(found)
