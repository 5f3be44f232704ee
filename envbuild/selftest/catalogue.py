"""Every probe, in the order in which they run."""

from __future__ import annotations

from envbuild.selftest.probes import (
    alloc,
    arch,
    attention,
    burn,
    compiler,
    conv,
    crash,
    dist,
    driver,
    fingerprint,
    gemm,
    health,
    identity,
    libs,
    memory,
    norm,
    norms,
    perf,
    precision,
    script,
    train,
)
from envbuild.selftest.registry import Probe

PROBES: tuple[Probe, ...] = (
    Probe("env.identity", "quick", "cuda", 60, identity.identity),
    Probe("env.driver", "quick", "cuda", 60, driver.driver, untouched=True),
    Probe("env.arch", "quick", "cuda", 200, arch.arch),
    Probe("env.libs", "quick", "cpu", 120, libs.libs),
    Probe("hw.health", "quick", "cuda", 60, health.health, untouched=True),
    Probe("init.alloc", "quick", "cpu", 240, alloc.alloc, untouched=True),
    Probe("gemm.crash", "quick", "cpu", 120, crash.crash),
    Probe("gemm.exact", "quick", "cpu", 60, gemm.exact),
    Probe("gemm.accuracy", "quick", "cpu", 60, gemm.accuracy),
    Probe("gemm.accumulator", "quick", "cpu", 60, precision.accumulator),
    Probe("gemm.fp8", "quick", "cpu", 60, precision.fp8),
    Probe("tf32.mode", "quick", "cpu", 60, precision.tf32),
    Probe("attention.math", "quick", "cpu", 120, attention.probe("math")),
    Probe("attention.flash", "quick", "cpu", 120, attention.probe("flash")),
    Probe("attention.efficient", "quick", "cuda", 120, attention.probe("efficient")),
    Probe("attention.cudnn", "quick", "cuda", 120, attention.probe("cudnn")),
    Probe("norm.torch", "standard", "cpu", 120, norm.probe(norms.torchs)),
    Probe("conv", "standard", "cpu", 180, conv.conv),
    Probe("compile.triton", "standard", "cpu", 180, compiler.triton),
    Probe("perf.gemm", "standard", "cpu", 180, perf.gemm),
    Probe("perf.memory", "standard", "cpu", 60, perf.memory),
    Probe("train.step", "standard", "cpu", 120, train.step),
    Probe("dist.staged", "standard", "cpu", 400, dist.staged, untouched=True),
    Probe("burn", "full", "cpu", 300, burn.burn),
    Probe("memory", "full", "cpu", 300, memory.memory),
    Probe("fingerprint", "asked", "cpu", 120, fingerprint.record),
    Probe("own.script", "quick", "script", 300, script.script),  # last: nobody knows what it leaves behind
)
