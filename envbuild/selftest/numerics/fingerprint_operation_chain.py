"""The chain of operations that a fingerprint runs, which are those of a small video model.

Every operation takes the output of the previous operation. Weights and the first input are hashes of counters, scaled
by powers of two and rounded to the dtype; to the weights of norms, 1 is added. Therefore they are the same on every
machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import float64_reference_operations, hashed_inputs
from envbuild.selftest.numerics.float64_reference_operations import Arithmetic, Exact

CHANNELS, FRAMES, SIDE = 8, 4, 16  # shape of the input video
STEM, WIDTH, HIDDEN, HEADS, MIXED = 32, 128, 512, 2, 96
TOKENS = FRAMES * (SIDE // 2) ** 2
EPSILON = 2.0**-16


@dataclass(frozen=True)
class Op:
    """An operation of the chain.

    `run(x, *weights)` calls torch as a model does. `exact(arithmetic, x, *weights)` computes the float64 reference.
    `weights` are float32 on the host. A `run` that is itself a function of torch is looked up when the chain is built.
    """

    name: str
    run: Callable[..., torch.Tensor]
    exact: Callable[..., Exact]
    weights: tuple[torch.Tensor, ...] = ()


def input_video() -> torch.Tensor:
    """Return the input video, float32 of shape (1, channels, frames, side, side)."""
    return signed_values((1, CHANNELS, FRAMES, SIDE, SIDE), 1)


def signed_values(shape: tuple[int, ...], seed: int, size: float = 1.0) -> torch.Tensor:
    """Return float32 values in [-size, size). `size` must be a power of two, so that scaling is exact."""
    return hashed_inputs.signed(shape, seed) * size


def operation_chain() -> tuple[Op, ...]:
    """Return the operations in the order in which they run."""
    return (
        Op(
            "conv3d",
            _conv3d,
            float64_reference_operations.convolution,
            (signed_values((STEM, CHANNELS, 3, 3, 3), 2, 2**-3), signed_values((STEM,), 3)),
        ),
        Op("silu", F.silu, float64_reference_operations.silu),
        Op("conv2d", _conv2d, _exact_conv2d, (signed_values((WIDTH, STEM, 3, 3), 4, 2**-3),)),
        Op("gelu", F.gelu, float64_reference_operations.gelu),
        Op(
            "layernorm",
            _layer_norm,
            _exact_layer_norm,
            (1 + signed_values((WIDTH,), 5, 2**-1), signed_values((WIDTH,), 6)),
        ),
        Op("linear.qkv", F.linear, float64_reference_operations.linear, _weights(3 * WIDTH, WIDTH, 7)),
        Op("sdpa", _attention, _exact_attention),
        Op("linear.out", F.linear, float64_reference_operations.linear, _weights(WIDTH, WIDTH, 9)),
        Op("rmsnorm", _rms_norm, _exact_rms_norm, (1 + signed_values((WIDTH,), 11, 2**-1),)),
        Op("linear.up", F.linear, float64_reference_operations.linear, _weights(HIDDEN, WIDTH, 12)),
        Op("gelu.tanh", _gelu_tanh, float64_reference_operations.gelu_tanh),
        Op("linear.down", F.linear, float64_reference_operations.linear, _weights(WIDTH, HIDDEN, 14)),
        Op(
            "matmul.scores",
            torch.matmul,
            float64_reference_operations.matmul,
            (signed_values((WIDTH, TOKENS), 16, 2**-2),),
        ),
        Op("softmax", _softmax, float64_reference_operations.softmax),
        Op(
            "matmul.mix",
            torch.matmul,
            float64_reference_operations.matmul,
            (hashed_inputs.uniform((TOKENS, MIXED), 17),),
        ),
        Op("mean", lambda x: torch.mean(x, dim=1), lambda how, x: float64_reference_operations.mean(how, x, 1)),
        Op("sum", lambda x: torch.sum(x, dim=-1), lambda how, x: float64_reference_operations.total(how, x, -1)),
    )


def _weights(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight and the bias of a linear layer whose output has about the magnitude of its input."""
    return signed_values((rows, columns), seed, 2**-3), signed_values((rows,), seed + 1)


def _conv3d(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.conv3d(x, w, b, padding=1)


def _frames(x: torch.Tensor) -> torch.Tensor:
    """Reshape (1, channels, frames, side, side) to (frames, channels, side, side)."""
    return x[0].transpose(0, 1).contiguous()


def _conv2d(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv2d(_frames(x), w, stride=2, padding=1)


def _exact_conv2d(how: Arithmetic, x: torch.Tensor, w: torch.Tensor) -> Exact:
    return float64_reference_operations.convolution(how, _frames(x), w, stride=2)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """Reshape (frames, width, side / 2, side / 2) to (1, tokens, width)."""
    return x.permute(0, 2, 3, 1).reshape(1, TOKENS, WIDTH)


def _layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(_tokens(x), (WIDTH,), w, b, EPSILON)


def _exact_layer_norm(how: Arithmetic, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Exact:
    return float64_reference_operations.layer_norm(how, _tokens(x), w, b, EPSILON)


def split_heads(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a tensor (1, tokens, 3 width) into q, k and v, each of shape (1, heads, tokens, width / heads)."""
    q, k, v = x.reshape(1, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).contiguous()
    return q, k, v


def _merged(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).reshape(1, TOKENS, WIDTH)


def _attention(x: torch.Tensor) -> torch.Tensor:
    return _merged(F.scaled_dot_product_attention(*split_heads(x)))


def _exact_attention(how: Arithmetic, x: torch.Tensor) -> Exact:
    found = float64_reference_operations.attention(how, *split_heads(x))
    return Exact(_merged(found.value), _merged(found.bound))


def _rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Compute RMSNorm as models implement it themselves. torch's own RMSNorm exists only since torch 2.4."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPSILON) * w.float()).to(x.dtype)


def _exact_rms_norm(how: Arithmetic, x: torch.Tensor, w: torch.Tensor) -> Exact:
    return float64_reference_operations.rms_norm(how, x, w, EPSILON)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, dim=-1)
