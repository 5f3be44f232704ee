"""env.arch: torch has machine code for this GPU, so that the driver compiles nothing at run time.

A wheel contains machine code for some architectures. It may also contain PTX, which the driver compiles on first use.
This compilation is slow, and a driver older than the CUDA toolkit of the wheel refuses it. The probe therefore runs
operations with compilation disabled. The driver reads the setting when CUDA starts, and importing torch does not start
CUDA. Forked processes can therefore disable compilation without importing torch again. Only calls can show whether
libraries such as cuBLAS and cuDNN have machine code too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from envbuild.selftest.harness import forked_work
from envbuild.selftest.harness.forked_work import ForkEnding, Tell
from envbuild.selftest.harness.probe_context import Context, missing_gpu
from envbuild.selftest.harness.probe_outcome_and_figures import ProbeFailure, Skip
from envbuild.selftest.inventory.device_code_compatibility import serves

Capability = tuple[int, int]

SECONDS = 90.0  # for starting CUDA, which may read its libraries from a slow disk, and for a few operations
# The driver reads these variables when CUDA starts. The cache is disabled because it may contain code that was compiled
# earlier.
_NO_JIT = {"CUDA_DISABLE_PTX_JIT": "1", "CUDA_CACHE_DISABLE": "1"}


def env_arch(context: Context) -> None:
    """env.arch: torch's arch list includes this GPU, and small operations run with the driver's compiler off."""
    os.environ.update(_NO_JIT)  # for the forked processes; this process has not started CUDA
    context.step("torch's list of architectures")
    survey = forked_work.run_forked(_survey, SECONDS)
    if "skip" in survey.reported:
        raise Skip(str(survey.reported["skip"]))
    if survey.failure:
        raise ProbeFailure("exception", f"the GPUs could not be listed: {survey.failure}")
    listed, found = survey.reported["listed"], {(int(a), int(b)): device for (a, b), device in survey.reported["cards"]}
    names = [f"{major}.{minor}" for major, minor in sorted(found)]
    context.traits.update(torch=str(torch.__version__), arch_list=listed, compute_capability=", ".join(names))
    for capability in sorted(found):
        code = serves(listed, "{}.{}".format(*capability))
        if code != "compiled":
            context.fail("mismatch", _missing(capability, code, listed))
    for capability, device in sorted(found.items()):
        context.step(f"small operations on {device} without JIT")
        ending = forked_work.run_forked(functools.partial(run_operations, device=device), SECONDS)
        fault = _fault(ending)
        if fault:
            context.fail("mismatch", "compute capability {}.{}: {}".format(*capability, fault))


def _survey(tell: Tell) -> None:
    missing = missing_gpu()
    if missing:
        tell("skip", missing)
        return
    tell("listed", torch.cuda.get_arch_list())
    tell("cards", list(gpus_by_capability().items()))


def gpus_by_capability() -> Mapping[Capability, str]:
    """Return one visible GPU for each compute capability."""
    return {torch.cuda.get_device_capability(i): f"cuda:{i}" for i in range(torch.cuda.device_count())}


def run_operations(tell: Tell, device: str) -> None:
    """Run operations of torch, cuBLAS and cuDNN with known results. Report the name of each operation before it runs,
    and finally the operations with wrong results."""
    count = torch.arange(1000, dtype=torch.float32)
    ones = torch.ones((32, 32))
    image = torch.ones((1, 1, 3, 3))
    wrong = []
    for name, work, value, result in (
        ("add", lambda x: x + x, count, 2 * count),
        ("sum", torch.sum, count, torch.tensor(499500.0)),
        ("exp", torch.exp, torch.zeros(1000), torch.ones(1000)),
        ("sort", lambda x: torch.sort(x)[0], count.flip(0), count),
        ("mm fp32", lambda x: x @ x, ones, 32 * ones),
        ("mm fp16", lambda x: x @ x, ones.half(), 32 * ones.half()),
        ("conv2d", lambda x: F.conv2d(x, x), image, torch.full((1, 1, 1, 1), 9.0)),
    ):
        tell("at", name)
        if not torch.equal(work(value.to(device)).cpu(), result):
            wrong.append(name)
    tell("wrong", wrong)


def _missing(capability: Capability, code: str | None, listed: Sequence[str]) -> str:
    has = "only PTX for it, which the driver would compile" if code == "ptx" else "no code for it"
    return (
        "compute capability {}.{}: torch {} has {} (its list: {}); install a torch whose architecture list includes "
        "it, or build torch with TORCH_CUDA_ARCH_LIST={}.{}".format(
            *capability, torch.__version__, has, " ".join(listed) or "empty", *capability
        )
    )


def _fault(ending: ForkEnding) -> str | None:
    at = ending.reported.get("at", "the start")
    if ending.failure:
        return f"{at} fails if compilation at run time is disabled: {ending.failure}"
    wrong = ending.reported.get("wrong")
    return f"wrong results of {', '.join(wrong)}" if wrong else None if wrong == [] else "no result was reported"
