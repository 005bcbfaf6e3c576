"""The ops of fast.py on CUDA as Triton kernels, a module for each. No GPU has run them yet (NOTES.md, "Open").

    python fast.py --compile    # registers, spilled bytes and shared memory of every kernel, compiled without a GPU
"""

from . import attend, chunkwise, delta, step
from .common import SHARED, usage

OPS = (attend, chunkwise, delta, step)


def every_launch(op, D: int, dtype: str, fullest: bool):
    """`op.launches`; or of each kernel and launch configuration the last alone, which has the most options."""
    if not fullest:
        return list(op.launches(D, dtype))
    return list({(launch[0], blocks(launch[4]), *launch[5:]): launch for launch in op.launches(D, dtype)}.values())


def blocks(constants: dict) -> tuple[int, ...]:
    """The sizes of a kernel's blocks among its constants."""
    return tuple(value for name, value in constants.items() if name in ("BM", "BN", "BD", "BV", "BP", "BF") and value)


def table(arches=(80, 90, 100), dims=(64, 128), dtypes=("bf16",), ops=OPS, fullest=False):
    """Print and yield a line for every kernel, launch configuration and device; `!` marks what misses its limit: shared memory, no
    spilled bytes forward and 256 backward."""
    print(f"{'kernel':<20}{'D':>4} {'dtype':<6}{'options':<24}{'sm':>4}{'blocks':>12}{'warps':>6}{'stages':>7}{'registers':>10}"
          f"{'spilled B':>10}{'shared B':>10}")
    for arch in arches:
        for D in dims:
            for dtype in dtypes:
                for op in ops:
                    for name, options, kernel, types, constants, warps, stages in every_launch(op, D, dtype, fullest):
                        x = usage(kernel, arch, types, constants, warps, stages)
                        limit = 0 if name in op.FORWARD else 256
                        x |= {"kernel": name, "options": options, "D": D, "dtype": dtype, "blocks": blocks(constants),
                              "fits": x["shared"] <= SHARED[arch] * 1024 and x["spilled"] <= limit}
                        print(f"{name:<20}{D:>4} {dtype:<6}{options:<24}{arch:>4}{'x'.join(map(str, x['blocks'])):>12}{warps:>6}{stages:>7}"
                              f"{x['registers']:>10}{x['spilled']:>10}{x['shared']:>10}{'' if x['fits'] else '  !'}", flush=True)
                        yield x
