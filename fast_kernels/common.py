"""What all kernels share: allocation, launching, refusals, and what a kernel uses of a GPU, read from machine code without one."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

DIMS = (16, 32, 64, 128, 256)  # head dims
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHARED = {80: 163, 90: 227, 100: 227}  # KiB of shared memory a block may have, by device


def empty(shape, dtype: torch.dtype, device) -> Tensor:
    """All outputs and scratch come from here: the tests make it return NaN."""
    return torch.empty(shape, dtype=dtype, device=device)


def strides(x: Tensor | None) -> tuple[int, int, int]:
    """Of batch, time and head; the last one is 1."""
    return (0, 0, 0) if x is None else x.stride()[:3]


def dense(x: Tensor | None) -> Tensor | None:
    """x, or a copy whose last stride is 1."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def launch(kernel, programs: int, *args, **options) -> None:
    """None if there is nothing to do."""
    if programs:
        kernel[(programs,)](*args, **options)


def need(op: str, holds, message: str) -> None:
    """ValueError, one line by name, unless it holds."""
    if not holds:
        raise ValueError(f"{op}: {message}")


def need_device(op: str, q: Tensor, **others: Tensor | None) -> None:
    """All on one CUDA device, or on the CPU through Triton's interpreter."""
    for name, x in others.items():
        need(op, x is None or x.device == q.device, f"{name} is not on q's device {q.device}")
    need(op, q.is_cuda or os.environ.get("TRITON_INTERPRET") == "1", f"device {q.device}: CUDA, or TRITON_INTERPRET=1")


@triton.jit
def low(x, dtype: tl.constexpr):
    """x in dtype; beyond float16's numbers, the greatest of them."""
    if dtype == tl.float16:
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    return x.to(dtype)


def usage(kernel, arch: int, types: dict[str, str], constants: dict, warps: int, stages: int) -> dict:
    """Registers, spilled bytes (stack and local memory) and bytes of shared memory of a compiled kernel.

    arch 80, 90 or 100; types: of each argument that is no constant, "*bf16", "*fp32", "*i32" (a pointer, aligned to 16 bytes), "i32",
    "fp32" or "strides" (three of them, multiples of 16); constants: of the others.
    """
    signature, attrs = {}, {}
    for i, arg in enumerate(kernel.arg_names):
        kind = "constexpr" if arg in constants else types[arg]
        signature[arg] = ("i32", "i32", "i32") if kind == "strides" else kind
        if kind == "strides":
            attrs |= {(i, j): [["tt.divisibility", 16]] for j in range(3)}
        elif kind.startswith("*"):
            attrs[(i,)] = [["tt.divisibility", 16]]
    code = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs),
                          target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "num_stages": stages})
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    use = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"arch": arch, "warps": warps, "stages": stages, "registers": use["REG"], "spilled": max(use["STACK"], use["LOCAL"]),
            "shared": code.metadata.shared}
