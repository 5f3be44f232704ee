"""Stand-ins for NVIDIA's apex: packages with its interface, right and made wrong, whose kernels are torch's operations.

The CPU simulates the GPU, so that the probes judge the stand-ins as they judge apex's own kernels. No code of apex is
used: its norms and its FusedAdam were rewritten from their definitions.

The probe of a seed with a fault runs only cases in which the fault shows; those of the right stand-ins run all cases.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.normalization import norm_apex, norm_torch
from envbuild.selftest.probes.probe_catalogue import PROBES as REAL
from envbuild.selftest.probes.training import optim_apex

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
NAMES = {SINGLE: "Float", HALF: "Half", BRAIN: "BFloat16"}


def reads(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Read a tensor as a kernel does that was compiled for a different dtype."""
    if values.dtype != dtype:
        raise RuntimeError(f"expected scalar type {NAMES[dtype]} but found {NAMES[values.dtype]}")
    return values


def summed(values: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The mean over the last dimension; the sum is kept in `dtype`."""
    if dtype is None:
        return values.mean(-1, keepdim=True)
    total = torch.zeros_like(values[..., :1])
    for part in torch.split(values, 16, dim=-1):
        total = (total + part.sum(-1, keepdim=True)).to(dtype).float()
    return total / values.shape[-1]


class Fused(torch.nn.Module):
    """LayerNorm and RMSNorm as apex's kernels compute them. The class attributes select the kind and its faults."""

    centred, mixed = True, False
    refuses: tuple[torch.dtype, torch.dtype] | None = None
    sums: torch.dtype | None = None
    wrong_row, wrong_gradient, casts, fallback = False, False, True, False

    def __init__(self, shape: tuple[int, ...], eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(shape))
        if self.centred:
            self.bias = torch.nn.Parameter(torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = [x, self.weight, *([self.bias] if self.centred else [])]
        if self.fallback:
            return self.operations(*given)
        if torch.is_autocast_enabled("cpu") and self.casts:
            given = [values.to(torch.get_autocast_dtype("cpu")) for values in given]
        with torch.autocast("cpu", enabled=False):
            return self.kernel(*given)

    def kernel(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if (x.dtype, weight.dtype) == self.refuses:
            reads(weight, SINGLE)
        out = weight.dtype if self.mixed and x.dtype == SINGLE else x.dtype
        if self.mixed:
            reads(torch.empty(0, dtype=weight.dtype), out)
        weight = reads(weight, out)
        wide = x.float()
        sums = self.sums if x.dtype == HALF else None
        centred = wide - summed(wide, sums) if self.centred else wide
        unit = centred * torch.rsqrt(summed(centred * centred, sums) + self.eps)
        if self.wrong_row and x.shape == (8, 1023) and x.dtype == BRAIN:
            unit = torch.cat([unit[:6], unit[5:6], unit[7:]])
        if self.wrong_gradient:
            first = torch.arange(len(x))[:, None] == 0
            return torch.where(first, self.last(unit, weight.detach(), bias), self.last(unit, weight, bias))
        return self.last(unit, weight, bias)

    def operations(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Stand-ins for apex's norms without a GPU, with the same refusals and type promotion."""
        if bias is not None:
            return F.layer_norm(x, weight.shape, weight, bias, self.eps)
        unit = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return weight * unit.to(weight.dtype)

    def last(self, unit: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply and add in the result's dtype, which keeps the gradient of the input in float32."""
        y = weight * unit.to(weight.dtype)
        return y if bias is None else y + bias


class Adam:
    """FusedAdam, computed chunk by chunk. The class attributes select its faults."""

    corrects, drops_tail, stale_master, moments = True, False, False, SINGLE
    rounds_capturable = True  # as apex does: moments are rounded to the parameters' dtype after the step
    on_gpu_only, old = False, False
    refuses: torch.dtype | None = None
    most_tensors, most_chunks = 1 << 30, 1 << 30  # tensors and chunks beyond these numbers are ignored

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if self.on_gpu_only:
            raise RuntimeError("Found no NVIDIA driver on your system.")
        if self.old and capturable:
            raise TypeError("__init__() got an unexpected keyword argument 'capturable'")
        self.params, self.lr, self.betas, self.eps = list(params), lr, betas, eps
        self.decoupled, self.decay, self.steps = adam_w_mode, weight_decay, 0
        self.capturable = capturable
        masters = [p.detach().clone().float() if master_weights else None for p in self.params]
        self.param_groups_master = [{"params": masters}]
        self.state = {
            p: {name: torch.zeros_like(p, dtype=SINGLE).to(self.kept(p.dtype)) for name in ("exp_avg", "exp_avg_sq")}
            for p in self.params
        }

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        return SINGLE if dtype == SINGLE else self.moments

    @torch.no_grad()
    def step(self) -> None:
        if self.params[0].dtype == self.refuses:
            raise RuntimeError("FusedAdam only support fp32.")
        self.steps += 1
        for number, p in enumerate(self.params[: self.most_tensors]):
            master = self.param_groups_master[0]["params"][number]
            if p.dtype == BRAIN:
                master = None
            flat, grad = p.detach().view(-1), p.grad.view(-1)
            for begin in range(0, min(len(flat), self.most_chunks * optim_apex.CHUNK), optim_apex.CHUNK):
                part = slice(begin, begin + optim_apex.CHUNK)
                if self.drops_tail and begin:
                    part = slice(begin, min(begin + optim_apex.CHUNK, len(flat)) // 4 * 4)
                source = flat if master is None else master.view(-1)
                new = self.update(number, source[part].float(), grad[part].float(), part)
                flat[part] = new.to(p.dtype)
                if master is not None and not self.stale_master:
                    master.view(-1)[part] = new
            if master is None and self.capturable and self.rounds_capturable:
                for moments in self.state[p].values():
                    moments.copy_(moments.to(p.dtype))

    def update(self, number: int, p: torch.Tensor, grad: torch.Tensor, part: slice) -> torch.Tensor:
        first, second = (moments.view(-1) for moments in self.state[self.params[number]].values())
        if not self.decoupled:
            grad = grad + self.decay * p
        m = self.betas[0] * first[part].float() + (1 - self.betas[0]) * grad
        v = self.betas[1] * second[part].float() + (1 - self.betas[1]) * grad * grad
        first[part], second[part] = m.to(first.dtype), v.to(second.dtype)
        m, v = first[part].float(), second[part].float()
        if self.corrects:
            m, v = m / (1 - self.betas[0] ** self.steps), v / (1 - self.betas[1] ** self.steps)
        update = m / (v.sqrt() + self.eps)
        return p - self.lr * (update + self.decay * p if self.decoupled else update)


# The stand-in classes that a probe's process gets when it imports apex.normalization, each with its attributes.
# `wrongs`: the attributes that make a stand-in of a class wrong.
NORMS = {
    "FusedLayerNorm": {"centred": True, "mixed": False},
    "MixedFusedLayerNorm": {"centred": True, "mixed": True},
    "FusedRMSNorm": {"centred": False, "mixed": False},
    "MixedFusedRMSNorm": {"centred": False, "mixed": True},
}
wrongs: dict[str, dict[str, Any]] = {}


def norms() -> dict[str, type]:
    return {name: type(name, (Fused,), {**is_, **wrongs.get(name, {})}) for name, is_ in NORMS.items()}


def optimizers() -> dict[str, type]:
    return {"FusedAdam": type("FusedAdam", (Adam,), wrongs.get("FusedAdam", {}))}


FILES = {
    "apex/__init__.py": "",
    "apex/normalization/__init__.py": "from selftest import standins\nglobals().update(standins.norms())\n",
    "apex/optimizers/__init__.py": "from selftest import standins\nglobals().update(standins.optimizers())\n",
    "fused_layer_norm_cuda.py": "",
    "amp_C.py": "",
}
FOREIGN = {"apex/__init__.py": "raise ImportError('cannot import name UnencryptedCookieSessionFactoryConfig')\n"}
UNCOMPILED = {name: text for name, text in FILES.items() if name.startswith("apex/")}
OTHER_TORCH = {
    **FILES,
    **dict.fromkeys(("fused_layer_norm_cuda.py", "amp_C.py"), "raise ImportError('undefined symbol: _ZN3c10')\n"),
}


def seeded(
    probe: str,
    name: str,
    files: dict[str, str] = FILES,
    select: Callable[[], None] = lambda: None,
    **wrong: dict[str, Any],
) -> Probe:
    """Return the probe, named after the seed, with a stand-in for apex of these files. `select`: selects the cases to
    run. `wrong`: class -> its changed attributes."""
    (real,) = (item for item in REAL if item.name == probe)

    def function(context: Context) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for path, text in files.items():
                file = Path(folder) / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            sys.path.insert(0, folder)
            wrongs.update(wrong)
            norm_apex.on_kernels = lambda context: name != "fallback"
            select()
            real.function(context)

    return Probe(f"{probe}:{name}", "quick", real.needs, real.timeout, function)


def norm(name: str, kinds: Iterable[str] = NORMS, pair: str | None = None, **wrong: Any) -> Probe:
    """Return norm.apex with faults in these classes. It runs only the cases of these classes with this pair of dtypes;
    None: all cases."""

    def select() -> None:
        module: Any = norm_torch
        groups = module.norm_case_groups
        module.norm_case_groups = lambda norms: (
            group for group in groups(norms) if group[0].norm.name in kinds and group[0].pair == pair
        )

    return seeded("norm.apex", name, select=select if pair else lambda: None, **dict.fromkeys(kinds, wrong))


def adam(
    name: str,
    variants: Iterable[str] = optim_apex.VARIANTS,
    dtypes: tuple[torch.dtype, ...] = optim_apex.DTYPES,
    **wrong: Any,
) -> Probe:
    """Return optim.apex with faults in FusedAdam. It runs only the cases of these variants and dtypes."""

    def select() -> None:
        module: Any = optim_apex
        module.VARIANTS = {variant: optim_apex.VARIANTS[variant] for variant in variants}
        module.DTYPES = dtypes

    return seeded("optim.apex", name, select=select, FusedAdam=wrong)


PROBES = (
    norm("right"),
    norm("half_sums", pair="fp16 x fp16", sums=HALF),
    norm("wrong_row", ["FusedRMSNorm"], "fp32 x fp32 autocast", wrong_row=True),
    norm("wrong_gradient", ["MixedFusedLayerNorm"], "fp32 x fp32", wrong_gradient=True),
    norm("refuses", ["MixedFusedRMSNorm"], "fp32 x fp16", refuses=(SINGLE, HALF)),
    norm("no_autocast", pair="fp32 x fp32 autocast", casts=False),
    norm("fallback", fallback=True),
    seeded("norm.apex", "missing", {}),
    seeded("norm.apex", "foreign", FOREIGN),
    seeded("norm.apex", "uncompiled", UNCOMPILED),
    seeded("norm.apex", "other_torch", OTHER_TORCH),
    adam("right"),
    adam("uncorrected", ["plain"], (SINGLE,), corrects=False),
    adam("tail", ["plain"], (SINGLE,), drops_tail=True),
    adam("list", ["plain"], (SINGLE,), most_tensors=36),
    adam("stale_master", ["master weights"], (SINGLE,), stale_master=True),
    adam("half_moments", ["plain"], (HALF,), moments=HALF),
    adam("exact_moments", ["capturable", "master weights"], (HALF, BRAIN), rounds_capturable=False),
    adam("refuses", ["plain"], (HALF,), refuses=HALF),
    adam("old", old=True),
    adam("gpu_only", on_gpu_only=True),
    seeded("optim.apex", "missing", {}),
    seeded("optim.apex", "uncompiled", UNCOMPILED),
    seeded("optim.apex", "other_torch", OTHER_TORCH),
)
