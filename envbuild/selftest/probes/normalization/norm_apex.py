"""norm.apex: apex's four norms over mixed dtypes, with and without autocast, forward and backward.

The probe runs the cases of norm.torch. The expected behaviour comes from apex's sources at 6424da3b (2026-07-08):

- Fused* returns the input's dtype and reads the weight as that dtype. torch therefore refuses any other pair with the
  message "expected scalar type Float but found Half". Mixed* returns the weight's dtype, and accepts a float32 input
  with a weight of any dtype.
- Under autocast all four norms cast all of their inputs to autocast's dtype.
- The kernels compute x / sigma in float32 and round it to the result's dtype, in which they multiply (and add).
- Without a GPU, no kernel of apex runs: LayerNorm is torch's own, and RMSNorm consists of single torch operations.

If apex refuses a pair of dtypes that it never supported, this is not a failure. Such pairs are reported with an
advisory for models that use them.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes import apex_loader
from envbuild.selftest.probes.normalization import norm_torch
from envbuild.selftest.probes.normalization.norm_fixed_cases import DTYPES, EPSILON, Norm, Pair, inputs_dtype

LAYER, RMS = ("FusedLayerNorm", "MixedFusedLayerNorm"), ("FusedRMSNorm", "MixedFusedRMSNorm")

SAME: frozenset[Pair] = frozenset((dtype, dtype) for dtype in DTYPES)
MIXED: frozenset[Pair] = SAME | {(torch.float32, dtype) for dtype in DTYPES}

# torch's message if a kernel reads a tensor as a dtype that it does not have. The advisory describes the workaround.
SCALAR_TYPE = re.compile(r"expected scalar type \w+ but found \w+")
ADVISORY = "apex-t5-mixed-dtype"


def norm_apex(context: Context) -> None:
    """norm.apex: apex's fused norms in mixed dtypes match float64, forward and backward; refused pairs are reported."""
    module = apex_loader.part("normalization", "fused_layer_norm_cuda")
    if on_kernels(context):
        found = kernels(module, norm_torch.autocast_dtype(context))
    else:
        context.traits["kernels"] = "none: on the CPU apex's norms are operations of torch"
        found = fallbacks(module)
    norm_torch.check_norms(context, found)
    _note_mixed(context)


def on_kernels(context: Context) -> bool:
    """Return whether apex's own kernels run on this device."""
    return not context.on_cpu


def kernels(module: Any, autocast: torch.dtype) -> tuple[Norm, ...]:
    """Return the four norms as implemented by apex's kernels."""
    return tuple(
        Norm(
            name,
            _call(getattr(module, name)),
            centred=name in LAYER,
            outputs=_weights if name.startswith("Mixed") else inputs_dtype,
            declared=MIXED if name.startswith("Mixed") else SAME,
            roundings=2 if name in LAYER else 1,
            autocast=autocast,
        )
        for name in (*LAYER, *RMS)
    )


def fallbacks(module: Any) -> tuple[Norm, ...]:
    """Return the four norms as they run without a GPU. There torch determines the supported pairs of dtypes, so only
    float32 with float32 is declared."""
    layers = [Norm(name, _call(getattr(module, name))) for name in LAYER]
    rms = [Norm(name, _call(getattr(module, name)), centred=False, outputs=_weights, roundings=1) for name in RMS]
    return (*layers, *rms)


def _weights(x: torch.dtype, weight: torch.dtype) -> tuple[torch.dtype, ...]:
    return (weight,)


def _call(kind: Any) -> Any:
    """Return a function that calls the module's forward with the given parameters, whatever their dtypes."""

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        layer = kind(tuple(weight.shape), eps=EPSILON)
        given = {"weight": weight, "bias": bias}
        return torch.func.functional_call(layer, {key: given[key] for key, _ in layer.named_parameters()}, (x,))

    return call


def _note_mixed(context: Context) -> None:
    """Record, for each norm, the pairs refused with the message that users of mixed dtypes see, and the advisory for
    this."""
    refused = {
        name: {pair: said for pair, said in pairs.items() if SCALAR_TYPE.fullmatch(said)}
        for name, pairs in context.traits["pairs"].items()
    }
    if any(refused.values()):
        context.traits["mixed_dtypes"] = {"refused": refused, "advisory": ADVISORY}
