"""Every kernel of fast_kernels/ as machine code, without a GPU: no spills on sm_90 forward, at most 256 bytes backward, and shared memory
within every device's limit. Of each kernel every launch configuration, with the most options; the step on sm_90 alone, where it has no
loop to speak of and many configurations (`python fast.py --compile` has them all)."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import reference

kernels = pytest.importorskip("fast_kernels", reason="the kernels need Triton: Linux", exc_type=ImportError)
CODE = """
import json, sys
import fast_kernels as kernels
op, arch, D = sys.argv[1:]
print(json.dumps(list(kernels.table((int(arch),), (int(D),), ops=[x for x in kernels.OPS if x.__name__ == op], fullest=True))))
"""


def compiled(op, arch, D):
    """The table of one op, compiled in a process of its own: here kernels are interpreted."""
    env = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", CODE, op, str(arch), str(D)], env=env | {"PYTHONPATH": os.path.dirname(reference.__file__)},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_machine_code():
    cases = [(op.__name__, arch, D) for op in kernels.OPS for arch in (80, 90, 100) for D in (64, 128) if arch == 90 or op is not kernels.step]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tables = list(pool.map(lambda case: compiled(*case), cases))
    for (op, arch, D), rows in zip(cases, tables):
        assert rows, op
        for x in rows:
            assert x["shared"] <= kernels.SHARED[arch] * 1024 and (x["fits"] or arch != 90), x
