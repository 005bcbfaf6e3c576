"""fast_kernels/attend.py through Triton's interpreter (see conftest.py) against reference.attend in float64."""

import inspect
import math

import pytest
import torch

import reference
from common import close

kernels = pytest.importorskip("fast_kernels.attend", reason="the kernels need Triton: Linux", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("poisoned")

INF = math.inf
SMALL = {"forward": (16, 16, 4, 1), "dq": (16, 16, 4, 1), "kept": (16, 16, 4, 1), "dkv": (32, 16, 4, 1)}


@pytest.fixture
def small(monkeypatch):
    """Blocks of 16 and chunks of 32: 37 steps are three blocks and two chunks."""
    monkeypatch.setattr(kernels, "config", lambda kernel, *rest: SMALL[kernel])
    monkeypatch.setattr(kernels, "chunk_length", lambda T, N: 32)


def draw(seed, *size):
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(B=2, T=37, H=6, Hk=3, D=16, sink=True, q_keep=False):
    tensors = dict(q=draw(1, B, T, H, D), k=draw(2, B, T, Hk, D), v=draw(3, B, T, Hk, D))
    return tensors | ({"sink": draw(4, H)} if sink else {}) | ({"q_keep": draw(5, B, T, H, D)} if q_keep else {})


def documents(B, T):
    """Documents of other lengths in each row, some of one token; a number comes back."""
    starts = torch.rand(B, T, generator=torch.Generator().manual_seed(0)) < 0.1
    starts[:, 20:22] = True
    return starts.cumsum(1) % 3


def run(module, tensors, options, dtype, rounding):
    """Outputs and gradients in dtype, of inputs and output gradients rounded to `rounding`."""
    leaves = {n: x.to(rounding).to(dtype).requires_grad_() for n, x in tensors.items()}
    out = module.attend(**leaves, **options)
    out = [out] if torch.is_tensor(out) else list(out)
    upstream = [draw(10 + j, *x.shape).to(rounding).to(x).masked_fill(x.isinf(), 0) for j, x in enumerate(out)]
    return out, torch.autograd.grad(out, list(leaves.values()), upstream, allow_unused=True, materialize_grads=True)


def compare(tensors, options, dtype=torch.float32):
    got, same = (run(module, tensors, options, dtype, dtype) for module in (kernels, reference))
    exact = run(reference, tensors, options, torch.float64, dtype)
    for part, times in ((0, 2), (1, 3)):
        for x in zip(got[part], exact[part], same[part], strict=True):
            close(*x, times)


def test_signature():
    assert inspect.signature(kernels.attend) == inspect.signature(reference.attend)


@pytest.mark.parametrize("window,keep,packed,sink,q_keep,returns", [
    (7, 0, False, False, False, ""), (7, 0, True, True, False, "return_lse"), (7, 3, False, True, False, "return_lse"),
    (7, 3, True, False, True, "return_peak"), (20, 18, True, True, True, "return_lse"), (20, 18, False, True, True, "return_peak"),
    (1, 1, False, False, True, ""), (None, 0, True, True, False, "return_peak"), (None, 3, False, True, True, "return_peak"),
    (0, 0, True, True, False, "return_peak"), (0, 2, True, False, False, "return_peak"), (99, 40, True, True, True, "")])
def test_options(small, window, keep, packed, sink, q_keep, returns):
    compare(inputs(sink=sink, q_keep=q_keep),
            dict(window=window, keep=keep, segment=documents(2, 37) if packed else None) | ({returns: True} if returns else {}))


@pytest.mark.parametrize("keep", [0, 2])
def test_long_documents(small, keep):
    """The loops' middle parts, which have no mask, end with the document."""
    segment = (torch.arange(110)[None] >= torch.tensor([[45], [80]])).sum(0)[None]
    compare(inputs(1, 110, 2, 1), dict(window=70, keep=keep, segment=segment))


def test_many_chunks(small, monkeypatch):
    """Kept keys past the first block, a document over four chunks."""
    monkeypatch.setattr(kernels, "chunk_length", lambda T, N: 16)
    segment = (torch.arange(75)[None] >= torch.tensor([[3], [16], [70]])).sum(0)[None]
    compare(inputs(1, 75, 2, 1, q_keep=True), dict(window=5, keep=19, segment=segment))


@pytest.mark.parametrize("T", [0, 1, 16, 17])
def test_lengths(small, T):
    compare(inputs(2, T, 3, 1, q_keep=True), dict(window=7, keep=2, segment=documents(2, T) if T != 16 else None, return_peak=True))


@pytest.mark.parametrize("D,T", [(32, 150), (64, 150), (128, 70), (256, 35)])
def test_head_dims(D, T):
    """The launch configurations of float32."""
    compare(inputs(1, T, 2, 1, D), dict(window=100 if D < 128 else 9, keep=2, return_lse=True))


@pytest.mark.parametrize("D,T,options", [
    (64, 333, dict(window=100)), (64, 150, dict(window=20, keep=3, return_peak=True)), (128, 150, dict(window=None)),
    (256, 70, dict(window=9, keep=2, return_lse=True)), (16, 150, dict(window=70, keep=2, return_lse=True))], ids=str)
def test_float16(D, T, options):
    segment = documents(1, T) if D == 16 else None
    compare(inputs(1, T, 2, 1, D, q_keep="keep" in options), options | {"segment": segment}, torch.float16)


@pytest.mark.parametrize("value", [-INF, INF, 100.0, -100.0])
def test_extreme_sinks(small, value):
    tensors, options = inputs(1, 20, 4, 2) | {"sink": torch.full((4,), value)}, dict(window=7, keep=3, return_lse=True)
    if value != -100:
        return compare(tensors, options)
    got = run(kernels, tensors, options, torch.float32, torch.float32)
    exact = run(reference, tensors, options, torch.float64, torch.float32)
    for x, y in zip((*got[0], *got[1][:3]), (*exact[0], *exact[1][:3])):
        close(x, y)
    assert 0 < got[1][3].abs().max() < math.exp(-90)  # float64 has 1 - sigmoid(100) = 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window,keep", [(7, 0), (7, 3), (16, 0), (17, 17), (None, 0)])
def test_visibility(small, window, keep, packed):
    """Who weighs in o, and who has a gradient in v, is (1) exactly; equal scores weigh equally."""
    T, D, segment = 37, 64, documents(1, 37) if packed else torch.zeros(1, 37)
    position = reference.document_positions(segment)
    document = (position == 0).cumsum(1)
    mask = reference.visible(position, position, window=window, keep=keep) & (document[:, :, None] == document[:, None])
    mask = (mask & torch.ones(T, T, dtype=torch.bool).tril())[0]
    one_hot = torch.eye(T, D)[None, :, None]
    v, zero = one_hot.clone().requires_grad_(), torch.zeros(1, T, 1, D)
    o = kernels.attend(zero, zero, v, window=window, keep=keep, segment=segment if packed else None)
    dv, = torch.autograd.grad(o, v, one_hot)
    for weights in (o[0, :, 0, :T], dv[0, :, 0, :T].T):
        assert torch.equal(weights != 0, mask)
        close(weights, mask / mask.sum(1, keepdim=True).double())


def test_peak_gradient_goes_to_the_first_maximum(small):
    """All scores equal: the first key in reach, of each document."""
    segment = (torch.arange(37) >= 20).long()[None]
    k, q = torch.zeros(1, 37, 1, 16, requires_grad=True), torch.ones(1, 37, 2, 16)
    peak = kernels.attend(q, k, k.detach(), window=5, segment=segment, return_peak=True)[2]
    dk, = torch.autograd.grad(peak.sum(), k)
    first = torch.maximum(torch.arange(37) - 4, 20 * segment[0])
    assert torch.equal(dk[0, :, 0, 0], torch.bincount(first, minlength=37) * 2 * 16**-0.5)


def test_masked_content_does_not_matter(small):
    """Huge numbers out of reach in reached blocks, NaN in the blocks that no query of the block reaches: bit-identical rows."""
    tensors = {n: x.float() for n, x in inputs(1, 75, 4, 2).items()}

    def rows(change):
        leaves = {n: x.clone() for n, x in tensors.items()}
        for name in "kv":
            change(leaves[name])
        leaves = {n: x.requires_grad_() for n, x in leaves.items()}
        o, lse, peak = kernels.attend(**leaves, window=7, keep=2, return_peak=True)
        loss = sum((x[:, 48:] * draw(j, *x[:, 48:].shape)).sum() for j, x in enumerate((o, lse, peak)))
        return [x[:, 48:] for x in (o, lse, peak, *torch.autograd.grad(loss, [leaves["q"], leaves["k"], leaves["v"]]))]

    before = rows(lambda x: None)
    for change in (lambda x: x[:, 16:42].mul_(1e30), lambda x: x[:, 16:42].fill_(1e30)):
        assert all(map(torch.equal, rows(change), before))
    with torch.no_grad():
        changed = {n: x.clone() for n, x in tensors.items()}
        for name in "kv":
            changed[name][:, 2:42] = math.nan
        assert torch.equal(kernels.attend(**changed, window=7, keep=2)[:, 48:], before[0])


def test_documents_do_not_touch(small):
    """Case 15: other contents in one document leave the rest bit-identical, gradients too; each equals its own run."""
    lengths = (5, 30, 1, 20)
    segment = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    tensors = {n: x.float() for n, x in inputs(1, sum(lengths), 3, 1).items()}
    options = dict(window=7, keep=2)

    def outcome(tensors, segment):
        leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
        o = kernels.attend(**leaves, **options, segment=segment)
        return [o, *torch.autograd.grad((o * draw(0, 1, sum(lengths), 3, 16)[:, : o.shape[1]]).sum(), [leaves[n] for n in "qkv"])]

    before = outcome(tensors, segment)
    changed = {n: x if n == "sink" else torch.cat([x[:, :5], 1e4 * x[:, 5:35], x[:, 35:]], 1) for n, x in tensors.items()}
    for x, y in zip(outcome(changed, segment), before):
        assert torch.equal(x[:, :5], y[:, :5]) and torch.equal(x[:, 35:], y[:, 35:])
    for x, y in zip(outcome({n: x if n == "sink" else x[:, :5] for n, x in tensors.items()}, None), before):
        close(x, y[:, :5].double())


def test_layouts(small):
    """Slices of larger tensors whose rest is NaN, expanded heads, a last stride that is not 1, expanded output gradients."""
    tensors = {n: x.float() for n, x in inputs(2, 21, 6, 3).items()}
    plain = {n: x.clone().requires_grad_() for n, x in tensors.items()}

    def within(x):
        big = torch.full((x.shape[0] + 1, x.shape[1] + 9, x.shape[2] + 2, x.shape[3] + 3), math.nan)
        part = big[1:, 4:-5, 1:-1, 2:-1]
        part.copy_(x)
        return part.requires_grad_()

    plain["k"] = plain["k"].detach()[:, :, :1].expand(-1, -1, 3, -1).contiguous().requires_grad_()
    odd = dict(q=within(tensors["q"]), k=plain["k"].detach()[:, :, :1].expand(-1, -1, 3, -1).requires_grad_(),
               v=tensors["v"].transpose(1, 3).contiguous().transpose(1, 3).requires_grad_(), sink=plain["sink"])
    assert odd["v"].stride(-1) != 1 and odd["k"].stride(2) == 0
    results = []
    for x in (plain, odd):
        o, lse = kernels.attend(**x, window=7, keep=2, return_lse=True)
        upstream = [torch.ones(()).expand_as(y) for y in (o, lse)]
        results.append([o, lse, *torch.autograd.grad([o, lse], list(x.values()), upstream)])
    assert all(map(torch.equal, *results))


def test_chunk_length():
    """A multiple of every key block, so that a block lies in one chunk; few chunks at any length."""
    blocks = {kernels.config("dkv", D, size, peak)[1] for D in (16, 32, 64, 128, 256) for size in (2, 4) for peak in (False, True)}
    for T in (1, 511, 512, 513, 70_000, 1_000_000):
        for N in (0, 1, 4, 100, 5000):
            L = kernels.chunk_length(T, N)
            assert not any(L % block for block in blocks) and -(-T // L) <= 128 and -(-T // L) * N <= max(2**16, N)


def test_refused(monkeypatch):
    x = dict(q=torch.zeros(2, 5, 6, 16), k=torch.zeros(2, 5, 3, 16), v=torch.zeros(2, 5, 3, 16))
    wide = {n: torch.zeros(*t.shape[:3], 80) for n, t in x.items()}
    cases = [(wide, "head dim 80"), ({n: t.double() for n, t in x.items()}, "float64"), (x | {"v": x["v"].half()}, "v is torch.float16"),
             (x | {"q": torch.zeros(2, 5, 7, 16)}, "7 query heads"), (x | {"v": torch.zeros(2, 5, 3, 32)}, "v (2, 5, 3, 32)"),
             (x | {"k": torch.zeros(2, 4, 3, 16)}, "k (2, 4, 3, 16)"), (x | {"sink": torch.zeros(3)}, "sink"),
             (x | {"segment": torch.zeros(2, 4)}, "segment"), (x | {"q_keep": x["k"]}, "q_keep"), (x | {"q": x["q"][0]}, "q (5, 6, 16)")]
    for tensors, name in cases:
        with pytest.raises(ValueError) as caught:
            kernels.attend(**tensors)
        assert name in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="cpu"):
        kernels.attend(**x)
