"""fast_kernels/delta.py through Triton's interpreter (see conftest.py) against reference.scan and reference.delta in float64."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F

import reference
from common import close

kernels = pytest.importorskip("fast_kernels.delta", reason="the kernels need Triton: Linux", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def small(monkeypatch):
    """Groups of two chunks, tiles of 16: 37 steps are three chunks in two groups, 17 columns two tiles."""
    monkeypatch.setattr(kernels, "group", lambda *sizes: 2)
    monkeypatch.setattr(kernels, "config", lambda kernel, *rest: (16, 4, 1))


def draw(seed, *size):
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(kind="scan", decay="channel", B=2, T=37, H=2, Hs=1, D=16, Dv=17, state=True):
    """kind: scan, bonus or delta; decay: channel, head or none. Decays of about a fifth a chunk; a delta rule's state stays bounded."""
    x = dict(q=draw(1, B, T, H, D), k=draw(2, B, T, Hs, D), v=draw(3, B, T, Hs, Dv))
    if decay != "none":
        x["log_a"] = -0.1 * draw(4, B, T, Hs, *[D] * (decay == "channel")).square()
    if kind == "delta":
        c = F.normalize(draw(5, B, T, Hs, D), dim=-1)
        x |= dict(b=-c * draw(6, B, T, Hs, 1).sigmoid(), c=c)
    if kind == "bonus":
        x["bonus"] = draw(7, Hs, D)
    return x | ({"state": draw(8, B, Hs, D, Dv)} if state else {})


def documents(B, T):
    """Documents of other lengths in each row, some of one token, a chunk with three; a number comes back."""
    starts = torch.rand(B, T, generator=torch.Generator().manual_seed(0)) < 0.1
    starts[:, 20:22] = True
    return starts.cumsum(1) % 3


def run(module, tensors, options, dtype, rounding):
    """Outputs and gradients in dtype, of inputs and output gradients rounded to `rounding`; states in float32, log_a as it is given."""
    leaves = {}
    for n, x in tensors.items():
        own = torch.float32 if n == "state" else rounding
        x = x.to(own).to(torch.float64 if dtype == torch.float64 else own)
        leaves[n] = x.requires_grad_()
    op = module.delta if "b" in tensors else module.scan
    o, C = op(**{"log_a": None} | leaves, **options)
    if dtype != torch.float64:
        o = o.to(dtype)
    upstream = [draw(10, *o.shape).to(rounding).to(o), draw(11, *C.shape).float().to(C)]
    return (o, C), torch.autograd.grad([o, C], list(leaves.values()), upstream, materialize_grads=True)


def compare(tensors, options={}, dtype=torch.float32):
    got, same = (run(module, tensors, options, dtype, dtype) for module in (kernels, reference))
    exact = run(reference, tensors, options, torch.float64, dtype)
    assert got[0][0].dtype == dtype and got[0][1].dtype == torch.float32
    for part, times in ((0, 2), (1, 3)):
        for x in zip(got[part], exact[part], same[part], strict=True):
            close(*x, times)


def test_signatures():
    for op in ("scan", "delta"):
        assert inspect.signature(getattr(kernels, op)) == inspect.signature(getattr(reference, op))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("kind", ["scan", "bonus", "delta"])
def test_options(small, kind, decay, packed):
    T, a = (37, 0) if decay != "channel" else (20, 5)  # two documents begin in step 15 and 16
    compare(inputs(kind, decay, B=1, T=T), dict(segment=documents(2, 37)[1:, a : a + T]) if packed else {})


@pytest.mark.parametrize("kind,decay", [("delta", "head"), ("scan", "channel"), ("bonus", "none")])
def test_heads(small, kind, decay):
    """Distinct sizes, one to three query heads a state; no state given."""
    T = 5 if decay == "channel" else 18
    H = {"delta": 6, "bonus": 9, "scan": 3}[kind]
    compare(inputs(kind, decay, 2, T, H, 3, 16, 7, state=False), dict(segment=documents(2, 37)[:, 4 : 4 + T]))


@pytest.mark.parametrize("kind,decay,T", [("delta", "channel", 0), ("delta", "channel", 1), ("delta", "head", 16), ("bonus", "head", 0),
                                          ("bonus", "head", 1), ("bonus", "head", 17)])
def test_lengths(small, kind, decay, T):
    tensors = inputs(kind, decay, T=T, B=1, H=1)
    if T:
        return compare(tensors)
    (o, C), (*_, dC) = run(kernels, tensors, {}, torch.float32, torch.float32)
    assert o.shape == (1, 0, 1, 17) and torch.equal(C, tensors["state"].float()) and torch.equal(dC, draw(11, *C.shape).float())


@pytest.mark.parametrize("kind,decay,D,Dv", [("scan", "channel", 32, 36), ("delta", "head", 64, 65), ("bonus", "head", 128, 128),
                                             ("delta", "head", 256, 20)])
def test_head_dims(kind, decay, D, Dv):
    """The launch configurations of float32."""
    compare(inputs(kind, decay, 1, 20, 2, 1, D, Dv))


@pytest.mark.parametrize("kind,decay,T,D,Dv", [("scan", "none", 70, 16, 16), ("scan", "head", 70, 64, 65), ("delta", "channel", 17, 16, 17),
                                               ("bonus", "channel", 17, 32, 32), ("delta", "head", 50, 64, 64),
                                               ("delta", "none", 35, 128, 16)])
def test_float16(kind, decay, T, D, Dv):
    compare(inputs(kind, decay, 1, T, 2, 1, D, Dv), dict(segment=documents(1, T)) if decay == "none" else {}, torch.float16)


def test_float16_far_from_one():
    """A state past the largest number of float16 in one document does not reach the others."""
    tensors = {n: x.to(torch.float32 if n == "state" else torch.float16) for n, x in inputs("scan", "none", 1, 40, state=False).items()}
    segment = (torch.arange(40) >= 20).long()[None]
    o, C = kernels.scan(**tensors, segment=segment)
    tensors["v"], tensors["k"] = (torch.cat([x[:, :20] * 1000, x[:, 20:]], 1) for x in (tensors["v"], tensors["k"]))
    o_, C_ = kernels.scan(**tensors, segment=segment)
    assert torch.equal(o[:, 20:], o_[:, 20:]) and torch.equal(C, C_) and not o_.isnan().any()


@pytest.mark.parametrize("kind,decay", [("delta", "channel"), ("delta", "head"), ("bonus", "head")])
def test_strong_decays(small, kind, decay):
    """e^-700 at some steps, and -inf: what came before is gone, the neighbours are exact."""
    tensors = inputs(kind, decay, B=1, T=18, H=1)
    tensors["log_a"][:, [3, 10, 11, 16]] = -700.0
    compare(tensors)
    got = kernels.delta if kind == "delta" else kernels.scan
    tensors = {n: x.float() for n, x in tensors.items()}
    before = got(**tensors)
    tensors["log_a"] = torch.where(tensors["log_a"] == -700, -math.inf, tensors["log_a"])
    assert all(map(torch.equal, got(**tensors), before))


def test_hard_delta(small):
    """One key again and again, wholly removed and written (beta = 1): [c, b) is -1 everywhere below the diagonal."""
    tensors = inputs("delta", "none", B=1, T=35)
    key = F.normalize(draw(20, 16), dim=0).expand(1, 35, 1, 16).clone()
    compare(tensors | dict(k=key, b=-key, c=key))


def test_carried_state(small):
    """Two calls with the state between them are one call."""
    for kind, decay in (("delta", "head"), ("bonus", "head")):
        tensors = {n: x.float() for n, x in inputs(kind, decay, B=1).items()}
        op = kernels.delta if kind == "delta" else kernels.scan
        o, C = op(**tensors)
        steps = lambda a, z: {n: x if n in ("state", "bonus") else x[:, a:z] for n, x in tensors.items()}
        first, C_ = op(**steps(0, 21))
        second, C_ = op(**steps(21, 37) | {"state": C_})
        close(torch.cat([first, second], 1), o.double())
        close(C_, C.double())


def test_padded_steps(small):
    """k = 0, log_a = 0, b = 0: the state is that of the steps before, whatever q, v and c are."""
    for kind, decay in (("scan", "head"), ("delta", "head")):
        op = kernels.delta if kind == "delta" else kernels.scan
        tensors = {n: x.float() for n, x in inputs(kind, decay, B=1, T=20).items()}
        C = op(**{n: x if n == "state" else x[:, :13] for n, x in tensors.items()})[1]
        for name in ("k", "log_a", "b"):
            if name in tensors:
                tensors[name][:, 13:] = 0
        for scale in (1, 1e20):
            y = {n: torch.cat([x[:, :13], scale * x[:, 13:]], 1) if n in "qvc" else x for n, x in tensors.items()}
            assert torch.equal(op(**y)[1], C)


@pytest.mark.parametrize("kind,decay", [("delta", "head"), ("bonus", "channel")])
def test_documents_do_not_touch(small, kind, decay):
    """Case 15: other contents in one document leave the rest bit-identical, gradients too; the first equals its own run."""
    lengths = (5, 20, 1, 11)
    segment = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    tensors = {n: x.float() for n, x in inputs(kind, decay, B=1, H=2 if decay == "head" else 1, state=False).items()}
    op = kernels.delta if kind == "delta" else kernels.scan
    by_step = [n for n in tensors if n != "bonus"]

    def outcome(tensors, segment):
        leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
        o, C = op(**leaves, segment=segment)
        return [o, *torch.autograd.grad((o * draw(0, 1, 37, *o.shape[2:])[:, : o.shape[1]]).sum(), [leaves[n] for n in by_step])]

    def change(n, x):
        return torch.cat([x[:, :5], x[:, 5:25] * (0.5 if n in ("b", "c", "log_a") else 1e4), x[:, 25:]], 1)

    before = outcome(tensors, segment)
    for x, y in zip(outcome({n: change(n, x) if n in by_step else x for n, x in tensors.items()}, segment), before, strict=True):
        assert torch.equal(x[:, :5], y[:, :5]) and torch.equal(x[:, 25:], y[:, 25:])
    for x, y in zip(outcome({n: x[:, :5] if n in by_step else x for n, x in tensors.items()}, None), before, strict=True):
        close(x, y[:, :5].double())


def test_layouts(small):
    """Slices of larger tensors whose rest is NaN, expanded heads, a last stride that is not 1, expanded output gradients."""
    tensors = {n: x.float() for n, x in inputs("delta", "head", 1, 18, 4, 2, Dv=16).items()}

    def within(x):
        big = torch.full([n + m for n, m in zip(x.shape, (1, 9, 2, 3))], math.nan)
        part = big[(slice(1, None), slice(4, -5), slice(1, -1), slice(2, -1))[: x.ndim]]
        part.copy_(x)
        return part.requires_grad_()

    plain = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    plain["k"] = tensors["k"][:, :, :1].expand(-1, -1, 2, -1).contiguous().requires_grad_()
    odd = {n: within(x) for n, x in tensors.items() if n in ("q", "log_a", "b", "c", "state")}
    odd |= dict(k=plain["k"].detach()[:, :, :1].expand(-1, -1, 2, -1).requires_grad_(),
                v=tensors["v"].transpose(1, 3).contiguous().transpose(1, 3).requires_grad_())
    results = []
    for x in (plain, {n: odd[n] for n in plain}):
        o, C = kernels.delta(**x)
        results.append([o, C, *torch.autograd.grad([o, C], list(x.values()), [torch.ones(()).expand_as(y) for y in (o, C)])])
    assert all(map(torch.equal, *results))


def test_log_a_and_bonus_in_float32(small):
    """With half-precision inputs the decays may stay float32, and so does their gradient."""
    tensors = {n: x.to(torch.float32 if n in ("log_a", "bonus", "state") else torch.float16).requires_grad_()
               for n, x in inputs("bonus", "head", 1, 20).items()}
    o, C = kernels.scan(**tensors)
    exact = {n: x.detach().double().requires_grad_() for n, x in tensors.items()}
    o_, C_ = reference.scan(**exact)
    for x, y in zip(torch.autograd.grad(C.sum() + o.float().sum(), list(tensors.values())),
                    torch.autograd.grad(C_.sum() + o_.sum(), list(exact.values()))):
        assert (x - y).norm() < 2e-3 * y.norm()
    assert torch.autograd.grad(kernels.scan(**tensors)[1].sum(), tensors["log_a"])[0].dtype == torch.float32


def test_group():
    """A group's states take at most STATES numbers, or it is 4 chunks."""
    for states, D, Dv in ((1, 16, 17), (16, 128, 128), (1024, 256, 256), (0, 64, 64)):
        n = kernels.group(states, D, Dv)
        assert n == 4 or 4 < n <= 1024 and n * states * D * Dv <= kernels.STATES


def test_refused(monkeypatch):
    x = {n: y.float() for n, y in inputs("scan", "head", 2, 5, 6, 3).items()}
    d = {n: y.float() for n, y in inputs("delta", "head", 2, 5, 6, 3).items()}
    wide = {n: torch.zeros(2, 5, y.shape[2], 80) for n, y in x.items() if n in "qk"}
    cases = [(x | wide, "head dim 80"), ({n: y.double() for n, y in x.items()}, "float64"),
             (x | {"v": x["v"].half()}, "v is torch.float16"), (x | {"q": torch.zeros(2, 5, 7, 16)}, "7 query heads"),
             (x | {"v": torch.zeros(2, 4, 3, 17)}, "v (2, 4, 3, 17)"),
             (x | {"k": torch.zeros(2, 4, 3, 16)}, "k (2, 4, 3, 16)"), (x | {"log_a": torch.zeros(2, 5, 6)}, "log_a"),
             (x | {"bonus": torch.zeros(6, 16)}, "bonus"), (x | {"state": torch.zeros(2, 3, 16, 16)}, "state"),
             (x | {"state": x["state"].half()}, "state is torch.float16"), (x | {"segment": torch.zeros(2, 4)}, "segment"),
             (x | {"log_a": x["log_a"].half()}, "log_a is torch.float16"), (d | {"b": d["b"][:, :4]}, "b must"),
             (d | {"c": d["c"].half()}, "c is torch.float16"), (x | {"q": x["q"][0]}, "q (5, 6, 16)"), (d | {"b": None}, "b must")]
    for tensors, name in cases:
        with pytest.raises(ValueError) as caught:
            (kernels.delta if "b" in tensors else kernels.scan)(**tensors)
        assert name in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="cpu"):
        kernels.scan(**x)
