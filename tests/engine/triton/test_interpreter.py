"""What kernels' tests rely on in Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _sum_up_to(bounds, out):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    total = 0
    for number in range(tl.load(bounds + program)):
        total += number
    tl.store(out + program, total)


def test_a_loop_may_end_at_a_loaded_number() -> None:
    out = torch.zeros(3, dtype=torch.int32)
    _sum_up_to[(3,)](torch.tensor([0, 1, 5], dtype=torch.int32), out)
    assert out.tolist() == [0, 0, 10]
