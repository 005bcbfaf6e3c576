"""fast.py against reference.py in float64: the same signatures, results and gradients.

    python -m pytest tests/test_fast.py
"""

import inspect
import math
import random

import pytest
import torch

import fast
import reference
from common import close, decoder, draw_tokens, every_row, read_pieces, same_cache

INF = math.inf
LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 333)
OPS = [name for name, f in vars(fast).items() if inspect.isfunction(f) and f.__module__ == "fast" and name[0] != "_"]


def choices(**fields):
    """Four draws of the fields at every length, the same ones every time."""
    rng = random.Random(0)
    cases = [{"T": T} | {name: rng.choice(values) for name, values in fields.items()} for T in LENGTHS for _ in range(4)]
    return pytest.mark.parametrize("case", cases, ids=lambda case: " ".join(f"{n}={v}" for n, v in case.items()))


def draw(seed, *size):
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def documents(B, T):
    """Segment numbers of random documents, one of them of a single token."""
    starts = torch.rand(B, T, generator=torch.Generator().manual_seed(0)) < 0.06
    starts[:, 20:22] = True
    return starts.cumsum(1)


def run(module, name, tensors, options, dtype):
    """Outputs and gradients of all float tensors; those called C, n, m are the initial state."""
    leaves = {n: x.to(dtype).requires_grad_() for n, x in tensors.items()}
    arguments = {n: x for n, x in leaves.items() if n not in ("C", "n", "m")}
    if "C" in leaves:
        arguments["state"] = tuple(leaves[n] for n in "Cnm")
    out = getattr(module, name)(**arguments, **options)
    out = [out] if torch.is_tensor(out) else [x for part in out for x in (part if isinstance(part, tuple) else [part])]
    loss = sum((x * draw(j, *x.shape).to(dtype)).masked_fill(x.isinf(), 0).sum() for j, x in enumerate(out))
    return out, torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True) if loss.requires_grad else []


def compare(name, tensors, options, dtypes=(torch.float64, torch.float32), gradients=True):
    """fast's op in each dtype against the reference in float64, on the same numbers."""
    tensors = {n: x.float() for n, x in tensors.items()}
    exact = run(reference, name, tensors, options, torch.float64)
    for dtype in dtypes:
        got, same = (run(module, name, tensors, options, dtype) for module in (fast, reference))
        for part, times in ((0, 2), (1, 3)) if gradients else ((0, 2),):
            for x in zip(got[part], exact[part], same[part], strict=True):
                close(*x, times)


def test_signatures():
    assert {"attend", "mlstm"} <= set(OPS)
    for name in OPS:
        assert inspect.signature(getattr(fast, name)) == inspect.signature(getattr(reference, name)), name


# ---------------------------------------------------------------- attend


def attend_inputs(B, T, H, Hk, D, sink=True, q_keep=True):
    tensors = dict(q=draw(1, B, T, H, D), k=draw(2, B, T, Hk, D), v=draw(3, B, T, Hk, D))
    return tensors | ({"sink": draw(4, H)} if sink else {}) | ({"q_keep": draw(5, B, T, H, D)} if q_keep else {})


@choices(D=(8, 16, 64), window=(1, 7, 64, 100, None), keep=(0, 3), segments=(False, True), sink=(False, True),
         q_keep=(False, True), return_lse=(False, True))
def test_attend(case):
    B, T, H, Hk = 2, case["T"], 6, 3
    compare("attend", attend_inputs(B, T, H, Hk, case["D"], case["sink"], case["q_keep"]),
            dict(window=case["window"], keep=case["keep"], return_lse=case["return_lse"],
                 segment=documents(B, T) if case["segments"] else None))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("q_keep", [False, True])
@pytest.mark.parametrize("keep", [0, 3])
@pytest.mark.parametrize("window", [7, 200, None])
def test_attend_one_option_at_a_time(sink, q_keep, keep, window):
    """150 queries: the block path at W = 7, the two short cuts where the window covers everything."""
    compare("attend", attend_inputs(1, 150, 4, 2, 8, sink, q_keep), dict(window=window, keep=keep), (torch.float64,))


@pytest.mark.parametrize("value", [-INF, INF, 100.0, -100.0])
def test_attend_extreme_sinks(value):
    tensors = attend_inputs(2, 129, 6, 3, 8) | {"sink": torch.full((6,), value)}
    compare("attend", tensors, dict(window=7, keep=3))


def test_attend_masked_content_does_not_matter():
    tensors = attend_inputs(1, 300, 4, 2, 8, q_keep=False)
    before = fast.attend(**tensors, window=7)
    for name in "kv":
        tensors[name] = torch.cat([tensors[name][:, :100] * 1e30, tensors[name][:, 100:]], 1)
    assert torch.equal(fast.attend(**tensors, window=7)[:, 106:], before[:, 106:])


# ---------------------------------------------------------------- mlstm


def mlstm_inputs(B, T, H, Hs, D, state=False, normalizer="floor"):
    tensors = dict(q=draw(1, B, T, H, D), k=draw(2, B, T, Hs, D), v=draw(3, B, T, Hs, D),
                   i=2 * draw(4, B, T, Hs), f=3 * draw(5, B, T, Hs))
    if state:
        tensors |= dict(C=draw(6, B, Hs, D, D), n=draw(7, B, Hs, D), m=draw(8, B, Hs))
    if normalizer == "plain":  # for positive features
        tensors |= {name: tensors[name].abs() for name in "qkn" if name in tensors}
    return tensors


@choices(D=(8, 16, 64), Hs=(3, 6), segments=(False, True), state=(False, True), normalizer=("floor", "plain"),
         m0=(0.0, -INF), scale=(None, 1.0))
def test_mlstm(case):
    B, T, H = 2, case["T"], 6
    compare("mlstm", mlstm_inputs(B, T, H, case["Hs"], case["D"], case["state"], case["normalizer"]),
            dict(normalizer=case["normalizer"], m0=case["m0"], scale=case["scale"],
                 segment=documents(B, T) if case["segments"] else None),
            gradients=T > 1 or case["state"])  # one step alone: o is v up to a factor that often is constant


@pytest.mark.parametrize("f", [(-5.0, -5.0), (3.0, -700.0), (-700.0, -700.0), (60.0, 60.0)], ids=str)
@pytest.mark.parametrize("segments", [False, True])
def test_mlstm_strong_decay(f, segments):
    """Case 12: 64 and more steps of log decay -5, one step of -700: finite, equal, gradients too."""
    tensors = mlstm_inputs(2, 100, 6, 3, 8)
    tensors["f"] = torch.full_like(tensors["f"], f[0])
    tensors["f"][:, 40] = f[1]
    compare("mlstm", tensors, dict(segment=documents(2, 100) if segments else None))


@pytest.mark.parametrize("i", [300.0, -30.0, -INF])
def test_mlstm_input_gate(i):
    """Case 13's +300, its opposite, and padded steps that cross and fill chunks."""
    tensors = mlstm_inputs(2, 140, 6, 3, 8)
    if i == -INF:
        padded = torch.zeros(140, dtype=torch.bool)
        padded[1:4] = padded[60:70] = padded[128:] = True
        tensors["i"][:, padded], tensors["f"][:, padded] = -INF, INF
    else:
        tensors["i"].fill_(i)
    for m0 in (0.0, -INF):
        compare("mlstm", tensors, dict(m0=m0))


def test_mlstm_gradient_through_the_state():
    """Case 14: two segments of back-propagation equal one, cut inside a chunk."""
    tensors = mlstm_inputs(2, 150, 6, 3, 8)
    whole, gradients = run(fast, "mlstm", tensors, {}, torch.float64)
    do, dstate = draw(0, 2, 150, 6, 8), [draw(j, *x.shape) for j, x in enumerate(whole[1:], 1)]
    first, second = ({n: x[:, part].clone().requires_grad_() for n, x in tensors.items()} for part in (slice(0, 90), slice(90, None)))
    o1, state = fast.mlstm(**first)
    middle = tuple(x.detach().requires_grad_() for x in state)
    o2, final = fast.mlstm(**second, state=middle)
    later = torch.autograd.grad([o2, *final], [*second.values(), *middle], [do[:, 90:], *dstate])
    earlier = torch.autograd.grad([o1, *state], list(first.values()), [do[:, :90], *later[5:]])
    close(torch.cat([o1, o2], 1), whole[0])
    for a, b, exact in zip(earlier, later, gradients):
        close(torch.cat([a, b], 1), exact)


# ---------------------------------------------------------------- both


@pytest.mark.parametrize("name", ["attend", "mlstm"])
def test_packed_documents(name):
    """Case 15: what another document of the row holds leaves a document bit-identical."""
    segment = torch.repeat_interleave(torch.arange(4), torch.tensor([5, 70, 1, 64]))[None]
    make, options = (attend_inputs, dict(window=9, keep=3)) if name == "attend" else (mlstm_inputs, {})
    tensors = make(1, 140, 6, 3, 8)
    other = {n: torch.cat([x[:, :5], x[:, 5:75].flip(1), x[:, 75:]], 1) if x.ndim > 1 else x for n, x in tensors.items()}
    a, b = (getattr(fast, name)(**x, **options, segment=segment) for x in (tensors, other))
    a, b = (a, b) if name == "attend" else (a[0], b[0])
    assert torch.equal(a[:, :5], b[:, :5]) and torch.equal(a[:, 75:], b[:, 75:]) and not torch.equal(a, b)


@pytest.mark.parametrize("name", ["attend", "mlstm"])
@pytest.mark.parametrize("module", [reference, fast], ids=lambda m: m.__name__)
def test_memory_layout(name, module):
    """Case 17: transposed, sliced and expanded inputs and output gradients give what contiguous ones give."""
    make, options = (attend_inputs, dict(window=9, keep=3)) if name == "attend" else (mlstm_inputs, {})
    plain = make(2, 150, 6, 3, 8)
    plain["k"], plain["v"] = (plain[n][:, :, :1].expand(-1, -1, 3, -1).contiguous() for n in "kv")
    strange = {n: x.transpose(0, -1).contiguous().transpose(0, -1) for n, x in plain.items()}
    strange["k"] = plain["k"][:, :, :1].expand(-1, -1, 3, -1)                    # stride 0
    strange["v"] = torch.stack([plain["v"], plain["v"] * 0], -1).flatten(3)[..., ::2]
    assert strange["k"].stride(2) == 0 and not (strange["v"].is_contiguous() or strange["q"].is_contiguous())
    results = []
    for tensors, do in ((plain, draw(9, 1, 150, 6, 1).expand(2, -1, -1, 8).contiguous()),
                        (strange, draw(9, 1, 150, 6, 1).expand(2, -1, -1, 8))):
        tensors = {n: x.requires_grad_() for n, x in tensors.items()}
        out = getattr(module, name)(**tensors, **options)
        out = out if name == "attend" else out[0]
        results.append([out, *torch.autograd.grad(out, list(tensors.values()), do)])
    for got, want in zip(results[1], results[0]):
        close(got, want)


@every_row
def test_decoder_on_fast_ops(row):
    """The whole model: logits and gradients of packed documents, and decoding in pieces."""
    models = [decoder(row, window=9, ops=ops) for ops in (None, fast)]
    tokens, segment = draw_tokens(2, 150), documents(2, 150)
    results = []
    for model in models:
        logits = model(tokens, segment=segment)
        logits.square().mean().backward()
        results.append([logits] + [p.grad for p in model.parameters()])
    for got, want in zip(results[1], results[0], strict=True):
        close(got, want)
    (exact, cache), (got, cache2) = (read_pieces(model, tokens, 67) for model in models)
    close(got, exact)
    same_cache(cache2, cache)


@pytest.mark.parametrize("module", [reference, fast])
def test_segment_numbers_may_come_back(module):
    """A document begins where the number changes, whatever numbers came before."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 150, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    lengths = (40, 70, 40)
    again, apart = (torch.tensor(numbers).repeat_interleave(torch.tensor(lengths))[None] for numbers in ([3, 1, 3], [0, 1, 2]))
    for options in (dict(window=20), dict(window=5, keep=2), dict()):
        assert torch.equal(module.attend(q, k, v, segment=again, **options), module.attend(q, k, v, segment=apart, **options))
