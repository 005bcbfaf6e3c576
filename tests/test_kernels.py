"""Every kernel of kernels/ as machine code, without a GPU: no spills on sm_90 forward, at most 256 bytes backward, and shared memory
within every device's limit."""

import json
import os
import subprocess
import sys

import pytest

import reference

kernels = pytest.importorskip("kernels", reason="the kernels need Triton: Linux", exc_type=ImportError)
CODE = """
import json, sys
import kernels
op = sys.argv[1]
print(json.dumps(list(kernels.table(ops=[x for x in kernels.OPS if x.__name__ == op], options=True))))
"""


@pytest.mark.parametrize("op", [op.__name__ for op in kernels.OPS])
def test_machine_code(op):
    env = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.path.dirname(reference.__file__)
    done = subprocess.run([sys.executable, "-c", CODE, op], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert {(x["arch"], x["D"]) for x in rows} == {(arch, D) for arch in (80, 90, 100) for D in (64, 128)}
    for x in rows:
        assert x["shared"] <= kernels.SHARED[x["arch"]] * 1024 and (x["fits"] or x["arch"] != 90), x
