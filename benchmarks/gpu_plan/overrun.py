"""The kernel of out_of_bounds.py in its own file: Triton reads a kernel's source file, and is imported only where it is
used."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def overrun(y, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 1.0)
