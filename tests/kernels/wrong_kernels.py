"""Kernels that compile and would be useless, each for a reason that a gate must see.

Run as a module, without TRITON_INTERPRET: compiles them and prints what is wrong as JSON.
"""

import json

import torch
import triton
import triton.language as tl

from expertmesh.kernels.aot import Compiled, compile_all, specialise
from expertmesh.kernels.gates import TARGETS
from expertmesh.kernels.launch import launch, recording


@triton.jit
def scalar_kernel(x, out, SIDE: tl.constexpr):
    """Ordinary cores of NVIDIA do such a product, out of registers that it has not got."""
    row, column = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    b = tl.load(x + row * SIDE + column)
    c = tl.dot(b, tl.trans(b), input_precision="ieee")
    tl.store(out + row * SIDE + column, c)


@triton.jit
def hoarding_kernel(x, out, count, SIDE: tl.constexpr, DEPTH: tl.constexpr):
    """Fetches more ahead than shared memory holds."""
    row, column = tl.arange(0, SIDE)[:, None], tl.arange(0, DEPTH)[None, :]
    c = tl.zeros((SIDE, SIDE), tl.float32)
    for at in range(0, count, DEPTH):
        b = tl.load(x + row * count + at + column)
        d = tl.load(x + (row + SIDE) * count + at + column)
        c = tl.dot(b, tl.trans(d), c)
    tl.store(out + row * SIDE + tl.arange(0, SIDE)[None, :], c)


@triton.jit
def empty_kernel(x):
    """What is left of a kernel that was optimised away."""
    tl.load(x)


def main() -> None:
    x, half = (
        torch.empty(1 << 20, dtype=d, device="meta") for d in (torch.float32, torch.bfloat16)
    )
    compiled = []
    for name in ("sm_90", "gfx942"):
        with recording(name) as launches:
            launch(scalar_kernel, (1, 70_000), x, x, SIDE=64)
            launch(hoarding_kernel, (1,), half, x, 4096, SIDE=32, DEPTH=512, num_stages=6)
            launch(empty_kernel, (1,), x, num_warps=32)
        compiled += [
            Compiled(specialise(one, TARGETS[name]), grid=(*one.grid, 1)) for one in launches
        ]
    compile_all(compiled, 2)
    print(json.dumps({f"{c.what.kernel} {c.what.target}": dict(c.missed()) for c in compiled}))


if __name__ == "__main__":
    main()
