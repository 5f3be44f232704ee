"""Probes of the driver and the GPUs over stubs (stubs.py): each case configures the answers of the stubs."""

import ctypes
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from envbuild.selftest.harness.forked_work import Tell
from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.environment import env_arch, init_alloc
from envbuild.selftest.probes.probe_catalogue import PROBES as REAL

Operations = Callable[[Tell, str], None]

CASES: Mapping[str, Mapping[str, str]] = {
    "env.driver:right": {"STUB_DRIVER": "580.65.06"},
    "env.driver:compat": {"STUB_DRIVER": "535.104.05"},
    "env.driver:old": {"STUB_DRIVER": "520.61.05"},
    "env.driver:unready": {"STUB_INIT": "802", "STUB_NAME": "CUDA_ERROR_SYSTEM_NOT_READY"},
    "env.driver:geforce": {"STUB_INIT": "804", "STUB_NAME": "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"},
    "env.driver:unknown": {"STUB_INIT": "999"},
    "env.driver:empty": {"STUB_INIT": "100"},
    "hw.health:right": {"STUB_COUNT": "2", "STUB_ECC_EVER": "3"},
    "hw.health:ecc": {"STUB_ECC": "5"},
    "hw.health:pending": {"STUB_PENDING": "1"},
    "hw.health:failed": {"STUB_FAILED": "1"},
    "hw.health:retiring": {"STUB_OLD": "1", "STUB_RETIRING": "1"},
    "hw.health:lost": {"STUB_ERROR": "15"},
    "hw.health:unanswered": {"STUB_ERROR": "999"},
    "hw.health:without_ecc": {"STUB_ERROR": "3"},
    "hw.health:denied": {"STUB_ERROR": "4"},
    "hw.health:silent": {"STUB_OLD": "1"},
    "hw.health:unloaded": {"STUB_NVML": "9"},
    "hw.health:stopped": {"STUB_INIT": "999"},
}


def case(name: str, answers: Mapping[str, str]) -> Probe:
    (real,) = (probe for probe in REAL if probe.name == name.partition(":")[0])

    def function(context: Context) -> None:
        torch.version.cuda = "13.0"
        os.environ.update(answers)  # the stubs' getenv sees it
        real.function(context)

    return Probe(name, "quick", real.needs, real.timeout, function, real.untouched)


OPERATIONS = env_arch.run_operations
LISTED = ["sm_50", "sm_80", "sm_86", "sm_90", "sm_90a", "sm_120"]


def wrong_operations(tell: Tell, device: str) -> None:
    torch.exp = lambda values: values
    OPERATIONS(tell, device)


def no_kernel(tell: Tell, device: str) -> None:
    tell("at", "exp")
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")


def without_switch(tell: Tell, device: str) -> None:
    tell("wrong", [name for name in ("CUDA_DISABLE_PTX_JIT", "CUDA_CACHE_DISABLE") if os.environ.get(name) != "1"])


def card(
    seed: str,
    capability: env_arch.Capability,
    listed: list[str],
    release: str,
    operations: Operations = OPERATIONS,
    cards: Callable[[], Any] | None = None,
) -> Probe:
    """Return a probe: env.arch on a GPU that the CPU simulates, with a torch that reports this release and these
    architectures."""

    def function(context: Context) -> None:
        cuda: Any = torch.cuda
        cuda.get_arch_list = lambda: listed
        torch.__version__ = release  # type: ignore[assignment]
        module: Any = env_arch
        module.missing_gpu = lambda: None
        module.gpus_by_capability, module.run_operations = cards or (lambda: {capability: "cpu"}), operations
        env_arch.env_arch(context)

    return Probe(f"env.arch:{seed}", "quick", "cuda", 120, function, untouched=True)


BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore"


def occupied(seed: str, mode: str, free: int = 0) -> Probe:
    """Return a probe: init.alloc at level standard on a GPU that the CPU simulates. `mode`: the GPU's compute mode, as
    NVML reports it; `free`: how many of the processes that start at the same time may use the GPU."""
    (real,) = (probe for probe in REAL if probe.name == "init.alloc")

    def function(context: Context) -> None:
        os.environ.update(STUB_MODE=mode)
        context.job = dataclasses.replace(context.job, level="standard", device="cpu")
        multiply, in_parallel = torch.mm, init_alloc.allocate_in_parallel

        def at_once(device: str, count: int) -> Any:
            turn, come = os.pipe()
            os.write(come, b"+" * free + b"-" * (count - free))

            def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                if os.read(turn, 1) == b"-":
                    raise RuntimeError(BUSY)
                return multiply(a, b)

            torch.mm = mm
            return in_parallel(device, count)

        module: Any = init_alloc
        module.allocate_in_parallel = at_once
        real.function(context)

    return Probe(f"init.alloc:{seed}", "quick", "cpu", 120, function, untouched=True)


PROBES = (
    occupied("exclusive", "3", 1),
    occupied("taken", "3"),
    occupied("prohibited", "2"),
    occupied("held", "0"),
    occupied("unanswered", "9"),
    *(case(name, answers) for name, answers in CASES.items()),
    card("right", (8, 9), LISTED, "2.9.0+cu128"),
    card("blackwell", (12, 0), LISTED[:-1], "2.6.0+cu124"),
    card("volta", (7, 0), LISTED[1:], "2.11.0+cu130"),
    card("ptx", (10, 0), [*LISTED, "compute_90"], "2.6.0+cu124"),
    card("wrong", (9, 0), LISTED, "2.9.0", wrong_operations),
    card("image", (9, 0), LISTED, "2.9.0", no_kernel),
    card("switch", (9, 0), LISTED, "2.9.0", without_switch),
    card("unasked", (9, 0), LISTED, "2.9.0", cards=lambda: ctypes.string_at(0)),
)
