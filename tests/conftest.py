"""Run from anywhere: the repository's modules are importable, and tiny tensors do not fight over cores, kernels are interpreted."""

import os
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: kernels run on the CPU, on a GPU machine too
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture
def poisoned(monkeypatch):
    """The kernels' outputs and scratch begin as NaN, indices as nonsense."""
    from fast_kernels import common

    def empty(shape, dtype, device):
        return torch.full(shape, float("nan") if dtype.is_floating_point else 123456, dtype=dtype, device=device)
    monkeypatch.setattr(common, "empty", empty)
