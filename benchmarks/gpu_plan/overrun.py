"""The kernel of out_of_bounds.py. It has a separate file because Triton reads a kernel's source file, and because only
the run of this kernel imports Triton."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def overrun(y, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 1.0)
