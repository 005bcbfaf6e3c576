"""fast_kernels/chunkwise.py through Triton's interpreter (see conftest.py) against reference.mlstm and reference.scan in float64."""

import inspect
import math

import pytest
import torch

import reference
from common import close
from bench import outputs_and_gradients
from test_fast import documents, linear_inputs, mlstm_inputs

kernels = pytest.importorskip("fast_kernels.chunkwise", reason="the kernels need Triton: Linux", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("poisoned")

INF = math.inf
CHUNK = kernels.chunk


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Chunks of 16: 37 steps are two and a half."""
    monkeypatch.setattr(kernels, "chunk", lambda size: 16)


def compare(name, tensors, options, dtype=torch.float32):
    """Outputs and gradients. Everything is rounded to dtype first; so is o of the reference, which computes in float32, but no state."""
    tensors = {n: x.to(dtype).double() for n, x in tensors.items()}
    exact = outputs_and_gradients(reference, name, tensors, options, torch.float64, rounding=dtype)
    got, same = (outputs_and_gradients(m, name, tensors, options, dtype, rounding=dtype) for m in (kernels, reference))
    same[0][0] = same[0][0].to(dtype)
    for part, times in ((0, 2), (1, 3)):
        for x in zip(got[part], exact[part], same[part], strict=True):
            close(*x, times)


def test_signatures():
    assert inspect.signature(kernels.mlstm) == inspect.signature(reference.mlstm)
    ours, theirs = (inspect.signature(m.scan).parameters for m in (kernels, reference))
    assert list(ours) == [name for name in theirs if name != "bonus"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("T, Hs, state, normalizer, m0, scale", [
    (37, 3, True, "floor", 0.0, None), (37, 6, False, "floor", -INF, 1.0), (16, 3, True, "plain", 0.0, 1.0), (33, 3, False, "plain", -INF, None),
    (2, 3, True, "floor", 0.0, None), (1, 2, True, "floor", 0.0, None)])
def test_mlstm(T, Hs, state, normalizer, m0, scale, packed):
    B = 2 if T < 37 else 1
    options = dict(normalizer=normalizer, m0=m0, scale=scale, segment=documents(2, T)[:B] if packed else None)
    compare("mlstm", mlstm_inputs(B, T, 6, Hs, 16, state, normalizer), options)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("T, decay, state, Dv", [(37, "scalar", True, None), (37, "none", False, 16), (33, "scalar", False, 40), (1, "scalar", True, 5)])
def test_scan(T, decay, state, Dv, packed):
    """Dv = D + 1 by default: the column of ones of a normaliser."""
    compare("scan", linear_inputs(1, T, 6, 3, 16, decay, state=state, Dv=Dv), dict(segment=documents(2, T)[1:] if packed else None))


@pytest.mark.parametrize("name", ["mlstm", "scan"])
def test_half_precision(name):
    tensors = mlstm_inputs(1, 37, 6, 3, 16) if name == "mlstm" else linear_inputs(1, 37, 6, 3, 16, "scalar")
    compare(name, tensors, {}, torch.float16)


@pytest.mark.parametrize("D", [32, 128, 256])
@pytest.mark.parametrize("name", ["mlstm", "scan"])
def test_head_dims(name, D, monkeypatch):
    """With the blocks that a GPU would get."""
    monkeypatch.undo()
    tensors = mlstm_inputs(1, 35, 2, 1, D) if name == "mlstm" else linear_inputs(1, 35, 2, 1, D, "scalar", Dv=D)
    compare(name, tensors, {})


@pytest.mark.parametrize("f", [(-5.0, -5.0), (3.0, -700.0), (60.0, 60.0)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_strong_decay(f, packed):
    """Case 12: a step of log decay -700 harms no other."""
    tensors = mlstm_inputs(1, 37, 4, 2, 16)
    tensors["f"] = torch.full_like(tensors["f"], f[0])
    tensors["f"][:, 20] = f[1]
    compare("mlstm", tensors, dict(segment=documents(2, 37)[:1] if packed else None))


def test_many_chunks_of_maxima():
    """`_maxima` in several blocks: m of 300 chunks."""
    tensors = {n: x[..., :1, :] if n in "qkv" else x[..., :1] for n, x in mlstm_inputs(1, 300 * 16, 1, 1, 16).items()}
    i, f = (tensors[n].float().transpose(1, 2).contiguous() for n in "if")
    g = torch.nn.functional.logsigmoid(f)
    decay, top, m = g.view(1, 1, 300, 16).sum(-1), i.view(1, 1, 300, 16).amax(-1), torch.zeros(1, 1)
    starts, end = torch.full((1, 1, 300), math.nan), torch.full((1, 1), math.nan)
    kernels._maxima[(1,)](decay.contiguous(), top.contiguous(), m, starts, end, 300, 256)
    for n in range(300):
        assert torch.allclose(starts[0, 0, n], m[0, 0], atol=1e-4)
        m = torch.maximum(decay[..., n] + m, top[..., n])
    assert torch.allclose(end, m, atol=1e-4)


def test_padded_steps_do_nothing():
    """i = -inf and f = +inf neither decay nor write, whatever k and v hold; and q, k, v past a document do not matter."""
    tensors = {n: x.float() for n, x in mlstm_inputs(2, 37, 6, 3, 16).items()}
    tensors["i"][:, 20:], tensors["f"][:, 20:] = -INF, INF
    o, state = kernels.mlstm(**tensors)
    changed = {n: torch.cat([x[:, :20], torch.randn_like(x[:, 20:])], 1) if n in "kv" else x for n, x in tensors.items()}
    again = kernels.mlstm(**changed)
    short = kernels.mlstm(**{n: x[:, :20] for n, x in tensors.items()})
    assert torch.equal(again[0], o) and all(map(torch.equal, again[1], state)) and torch.equal(short[0], o[:, :20])
    for a, b in zip(short[1], state):
        close(a, b.double())


def test_a_document_does_not_see_the_one_before():
    segment = (torch.arange(37) >= 21).long().expand(2, -1)
    tensors = {n: x.float().requires_grad_() for n, x in mlstm_inputs(2, 37, 6, 3, 16).items()}
    o, _ = kernels.mlstm(**tensors, segment=segment)
    for g in torch.autograd.grad(o[:, 21:].sum(), list(tensors.values())):
        assert not g[:, :21].any() and g[:, 21:].any()
    changed = {n: torch.cat([torch.randn_like(x[:, :21]), x[:, 21:]], 1) for n, x in tensors.items()}
    assert torch.equal(kernels.mlstm(**changed, segment=segment)[0][:, 21:], o[:, 21:])


@pytest.mark.parametrize("name, dtype", [("mlstm", torch.float32), ("scan", torch.float16)])
def test_chunks_of_64(name, dtype, monkeypatch):
    """The length that a GPU runs."""
    monkeypatch.setattr(kernels, "chunk", CHUNK)
    assert kernels.chunk(dtype.itemsize) in (32, 64)
    tensors = mlstm_inputs(1, 77, 2, 1, 16) if name == "mlstm" else linear_inputs(1, 77, 2, 1, 16, "scalar", state=True)
    compare(name, tensors, dict(segment=documents(2, 77)[:1]), dtype)


def test_strides_and_upstream_views():
    """Sliced, transposed and expanded inputs give the bits of contiguous ones."""
    plain = {n: x.float() for n, x in mlstm_inputs(2, 21, 6, 3, 16).items()}
    plain["k"] = plain["k"][:, :, :1].expand(-1, -1, 3, -1).contiguous()
    odd = plain | {"q": torch.cat([plain["q"]] * 2, 1)[:, :21], "k": plain["k"][:, :, :1].expand(-1, -1, 3, -1),
                   "v": plain["v"].transpose(1, 3).contiguous().transpose(1, 3)}
    results = []
    for x in (plain, odd):
        x = {n: y.detach().requires_grad_() for n, y in x.items()}
        o, _ = kernels.mlstm(**x)
        results.append([o, *torch.autograd.grad(o, list(x.values()), torch.ones(()).expand_as(o))])
    assert all(map(torch.equal, *results))


def test_empty():
    x = {n: y[:, :0].float() for n, y in mlstm_inputs(2, 3, 6, 3, 16).items()}
    state = [y.requires_grad_() for y in reference.mlstm_state(2, 3, 16)]
    o, got = kernels.mlstm(**x, state=state)
    assert o.shape == (2, 0, 6, 16) and all(map(torch.equal, got, state))
    assert all((g == 1).all() for g in torch.autograd.grad(sum(y.sum() for y in got), state))
    o, C = kernels.scan(x["q"], x["k"], x["v"], state=state[0])
    assert o.shape == (2, 0, 6, 16) and torch.equal(C, state[0])


def test_refused(monkeypatch):
    x = {n: y.float() for n, y in mlstm_inputs(2, 5, 6, 3, 16).items()}
    cases = [({n: y.double() if n in "qkv" else y for n, y in x.items()}, "float64"), (x | {"v": x["v"].half()}, "v is torch.float16"),
             (x | {n: torch.zeros(2, 5, x[n].shape[2], 80) for n in "qkv"}, "head dim 80"), (x | {"q": torch.zeros(2, 5, 7, 16)}, "7 query heads"),
             (x | {"i": torch.zeros(2, 5, 6)}, "i must be (2, 5, 3)"), (x | {"normalizer": "none"}, "normalizer 'none'"),
             (x | {"segment": torch.zeros(2, 4)}, "segment"), (x | {"state": reference.mlstm_state(2, 6, 16)}, "state"),
             (x | {"k": torch.zeros(2, 4, 3, 16)}, "k (2, 4, 3, 16)")]
    for tensors, name in cases:
        with pytest.raises(ValueError) as caught:
            kernels.mlstm(**tensors)
        assert name in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="cpu"):
        kernels.mlstm(**x)
