"""Every probe, in the order in which the probes start.

Up to six probes run at a time. Long probes should come early in their level, because at the end they would run alone.
Most probes that must run alone are listed next to each other, because all other probes wait while they run.
"""

from __future__ import annotations

from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.probes.attention import attention_backend_probes, attention_sampled_cases
from envbuild.selftest.probes.convolution import conv, conv_sampled_cases
from envbuild.selftest.probes.environment import (
    compile_triton,
    env_arch,
    env_driver,
    env_gpu_identity,
    env_libs,
    init_alloc,
    own_script,
)
from envbuild.selftest.probes.gemm import gemm_crash, gemm_exact_and_accuracy, gemm_precision, gemm_sampled_cases
from envbuild.selftest.probes.hardware import burn, hw_health, large, memory, perf, transfer
from envbuild.selftest.probes.linear_algebra import fft_and_linalg
from envbuild.selftest.probes.multi_gpu import dist_nodes, dist_staged
from envbuild.selftest.probes.normalization import norm_apex, norm_sampled_cases, norm_torch
from envbuild.selftest.probes.operations import fingerprint, operations, repeat
from envbuild.selftest.probes.training import graph_replay, optim_apex, optim_torch, train_repeat, train_step

# The lowest compute capabilities are those in torch's sources: aten/src/ATen/native/cuda/ScaledBlas.cpp for fp8,
# transformers/cuda/sdp_utils.cpp for attention. Before torch 2.2, FlashAttention also supported 7.5.
PROBES: tuple[Probe, ...] = (
    Probe("env.identity", "quick", "cuda", 60, env_gpu_identity.env_identity),
    Probe("env.driver", "quick", "cuda", 60, env_driver.env_driver, untouched=True),
    Probe("env.arch", "quick", "cuda", 200, env_arch.env_arch, untouched=True),
    Probe("env.libs", "quick", "cpu", 120, env_libs.env_libs),
    Probe("hw.health", "quick", "cuda", 60, hw_health.hw_health, untouched=True),
    Probe("init.alloc", "quick", "cpu", 240, init_alloc.init_alloc, untouched=True, alone=True),
    Probe("transfer", "quick", "cpu", 120, transfer.transfer, alone=True),
    Probe("gemm.crash", "quick", "cpu", 120, gemm_crash.gemm_crash),
    Probe("attention.cudnn", "quick", "cuda", 120, attention_backend_probes.attention_cudnn, least_capability=(8, 0)),
    Probe("attention.cases", "quick", "cpu", 300, attention_sampled_cases.attention_cases),
    Probe("operations", "quick", "cpu", 120, operations.operations),
    Probe("gemm.exact", "quick", "cpu", 60, gemm_exact_and_accuracy.gemm_exact),
    Probe("gemm.accuracy", "quick", "cpu", 60, gemm_exact_and_accuracy.gemm_accuracy),
    Probe("gemm.accumulator", "quick", "cpu", 60, gemm_precision.gemm_accumulator),
    Probe("gemm.fp8", "quick", "cpu", 60, gemm_precision.gemm_fp8, least_capability=(8, 9)),
    Probe("gemm.cases", "quick", "cpu", 120, gemm_sampled_cases.gemm_cases),
    Probe("tf32.mode", "quick", "cpu", 60, gemm_precision.tf32_mode),
    Probe("attention.math", "quick", "cpu", 120, attention_backend_probes.attention_math),
    Probe("attention.flash", "quick", "cpu", 120, attention_backend_probes.attention_flash, least_capability=(8, 0)),
    Probe("attention.efficient", "quick", "cuda", 120, attention_backend_probes.attention_efficient),
    Probe("norm.cases", "quick", "cpu", 180, norm_sampled_cases.norm_cases),
    Probe("conv.cases", "quick", "cpu", 180, conv_sampled_cases.conv_cases),
    Probe("repeat", "quick", "cpu", 180, repeat.repeat),
    Probe("graph.replay", "quick", "cuda", 60, graph_replay.graph_replay),
    Probe("fft", "standard", "cpu", 60, fft_and_linalg.fft),
    Probe("linalg", "standard", "cpu", 60, fft_and_linalg.linalg),
    Probe("optim.torch", "standard", "cpu", 60, optim_torch.optim_torch),
    Probe("norm.torch", "standard", "cpu", 120, norm_torch.norm_torch),
    Probe("norm.apex", "standard", "cpu", 120, norm_apex.norm_apex),
    Probe("optim.apex", "standard", "cpu", 120, optim_apex.optim_apex),
    Probe("conv", "standard", "cpu", 180, conv.conv),
    Probe("compile.triton", "standard", "cpu", 180, compile_triton.compile_triton),
    Probe("large", "standard", "cpu", 300, large.large, alone=True),
    Probe("perf.gemm", "standard", "cpu", 180, perf.perf_gemm, alone=True),
    Probe("perf.memory", "standard", "cpu", 60, perf.perf_memory, alone=True),
    Probe("train.step", "standard", "cpu", 120, train_step.train_step),
    Probe("train.repeat", "standard", "cpu", 180, train_repeat.train_repeat, untouched=True),
    Probe("dist.staged", "standard", "cpu", 400, dist_staged.dist_staged, untouched=True, alone=True),
    Probe("burn", "full", "cpu", 300, burn.burn, alone=True),
    Probe("memory", "full", "cpu", 600, memory.memory, alone=True),
    Probe("dist.nodes", "on-request", "cpu", 900, dist_nodes.dist_nodes, untouched=True, alone=True),
    Probe("fingerprint", "on-request", "cpu", 120, fingerprint.fingerprint),
    Probe("own.script", "quick", "script", 300, own_script.own_script),  # last, because its side effects are unknown
)
