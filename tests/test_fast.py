"""fast.py against reference.py in float64: the same signatures, results and gradients.

    python -m pytest tests/test_fast.py
"""

import inspect
import json
import math
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bench
import fast
import reference
from reference import VARIANTS
from common import close, decoder, draw_tokens, every_row, read_pieces, refused, same_cache
from bench import outputs_and_gradients

INF = math.inf
LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 333)
OPS = ("attend", "mlstm", "scan", "delta", "distill_loss")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch fills what it does not initialise with NaN while it is asked for deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


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


def compare(name, tensors, options, dtypes=(torch.float64, torch.float32), gradients=True):
    """fast's op in each dtype against the reference in float64, on the same numbers."""
    tensors = {n: x.float() for n, x in tensors.items()}
    exact = outputs_and_gradients(reference, name, tensors, options, torch.float64)
    for dtype in dtypes:
        got, same = (outputs_and_gradients(module, name, tensors, options, dtype) for module in (fast, reference))
        for part, times in ((0, 2), (1, 3)) if gradients else ((0, 2),):
            for x in zip(got[part], exact[part], same[part], strict=True):
                close(*x, times)


def test_signatures():
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


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("group", [1, 2**17])
def test_mlstm_groups_of_chunks(group, segments, monkeypatch):
    """One chunk at a time, or two, in place of all: the state and its gradient go from group to group."""
    monkeypatch.setattr(fast, "GROUP", group)
    tensors = mlstm_inputs(2, 300, 6, 3, 8, state=True)
    compare("mlstm", tensors, dict(segment=documents(2, 300) if segments else None))


def test_mlstm_gradient_through_the_state():
    """Case 14: two segments of back-propagation equal one, cut inside a chunk."""
    tensors = mlstm_inputs(2, 150, 6, 3, 8)
    whole, gradients = outputs_and_gradients(fast, "mlstm", tensors, {}, torch.float64)
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


# ---------------------------------------------------------------- scan, delta


def linear_inputs(B, T, H, Hs, D, decay="vector", delta=False, bonus=False, state=False, Dv=None):
    """Inputs of `scan`, or of `delta`: there b and c as a delta rule has them, so that the state stays bounded."""
    tensors = dict(q=draw(1, B, T, H, D), k=draw(2, B, T, Hs, D), v=draw(3, B, T, Hs, Dv or D + 1))
    if decay != "none":
        tensors["log_a"] = -draw(4, B, T, Hs, *[D] * (decay == "vector")).square()
    if delta:
        c = torch.nn.functional.normalize(draw(6, B, T, Hs, D), dim=-1)
        tensors |= dict(b=-c * draw(7, B, T, Hs, 1).sigmoid(), c=c) | ({} if decay != "none" else {"log_a": torch.zeros(B, T, Hs)})
    if bonus:
        tensors["bonus"] = draw(8, Hs, D)
    return tensors | ({"C": draw(9, B, Hs, D, Dv or D + 1)} if state else {})


def op(tensors):
    return "delta" if "b" in tensors else "scan"


@choices(D=(8, 16, 64), Hs=(3, 6), decay=("none", "scalar", "vector"), kind=("scan", "delta", "bonus"), segments=(False, True),
         state=(False, True))
def test_scan_and_delta(case):
    """Chunks against the loop over t (case 11)."""
    T, kind = min(case["T"], 140), case["kind"]
    tensors = linear_inputs(2, T, 6, case["Hs"], case["D"], case["decay"], kind == "delta", kind == "bonus", case["state"])
    compare(op(tensors), tensors, dict(segment=documents(2, T) if case["segments"] else None))


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("kind", ["scan", "delta", "bonus"])
@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
def test_quadratic_form(decay, kind, segments):
    """The masked matrices against the loop, with a carried state, in float64; every gradient too."""
    tensors = linear_inputs(2, 37, 6, 3, 5, decay, kind == "delta", kind == "bonus", True)
    options = dict(segment=documents(2, 37) if segments else None)
    exact, got = (outputs_and_gradients(reference, name, tensors, options, torch.float64) for name in (op(tensors), "quadratic"))
    for part in (0, 1):
        for a, b in zip(got[part], exact[part], strict=True):
            close(a, b)


@pytest.mark.parametrize("log_a", [(-5.0, -5.0), (-0.05, -700.0), (-700.0, -700.0), (0.0, 0.0)], ids=str)
@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("kind", ["scan", "delta", "bonus"])
def test_linear_strong_decay(log_a, decay, kind):
    """Case 12: 100 steps of log decay -5, one step of -700: finite, equal, gradients too."""
    tensors = linear_inputs(2, 100, 6, 3, 8, decay, kind == "delta", kind == "bonus", True)
    tensors["log_a"] = torch.full_like(tensors["log_a"], log_a[0])
    tensors["log_a"][:, 40] = log_a[1]
    for segment in (None, documents(2, 100)):
        compare(op(tensors), tensors, dict(segment=segment))


@pytest.mark.parametrize("kind", ["scan", "delta", "bonus"])
@pytest.mark.parametrize("module", [reference, fast], ids=lambda m: m.__name__)
def test_linear_padded_steps(module, kind):
    """Padded steps (k = b = 0, log_a = 0) leave the state bit-identical and the others as if they were not there."""
    tensors = linear_inputs(2, 140, 6, 3, 8, "vector", kind == "delta", kind == "bonus", True)
    padded = torch.zeros(140, dtype=torch.bool)
    padded[1:4] = padded[60:70] = padded[128:] = True
    short = {n: x[:, ~padded] if n not in ("C", "bonus") else x for n, x in tensors.items()}
    for name in {"k", "b", "log_a"} & tensors.keys():
        tensors[name][:, padded] = 0
    (o, C), (o2, C2) = (outputs_and_gradients(module, op(tensors), x, {}, torch.float64)[0] for x in (tensors, short))
    close(o[:, ~padded], o2)
    close(C, C2)
    idle = {n: x[:, 128:] if n not in ("C", "bonus") else x for n, x in tensors.items()}
    assert torch.equal(outputs_and_gradients(module, op(tensors), idle, {}, torch.float64)[0][1], tensors["C"])


@pytest.mark.parametrize("kind", ["scan", "delta", "bonus"])
def test_linear_gradient_through_the_state(kind):
    """Case 14: two segments of back-propagation equal one, cut inside a chunk."""
    tensors = linear_inputs(2, 150, 6, 3, 8, "vector", kind == "delta", kind == "bonus", True)
    fixed = {n: tensors[n] for n in ("C", "bonus") if n in tensors}
    (o, C), gradients = outputs_and_gradients(fast, op(tensors), tensors, {}, torch.float64)
    do, dC = draw(0, *o.shape), draw(1, *C.shape)
    parts = [{n: x[:, part].clone().requires_grad_() for n, x in tensors.items() if n not in fixed}
             for part in (slice(0, 90), slice(90, None))]
    first, bonus = fixed["C"].clone().requires_grad_(), {n: fixed[n] for n in fixed if n == "bonus"}
    o1, state = getattr(fast, op(tensors))(**parts[0], **bonus, state=first)
    middle = state.detach().requires_grad_()
    o2, final = getattr(fast, op(tensors))(**parts[1], **bonus, state=middle)
    later = torch.autograd.grad([o2, final], [*parts[1].values(), middle], [do[:, 90:], dC])
    earlier = torch.autograd.grad([o1, state], [*parts[0].values(), first], [do[:, :90], later[-1]])
    close(torch.cat([o1, o2], 1), o)
    exact = dict(zip(tensors, gradients))
    for name, a, b in zip(parts[0], earlier, later):
        close(torch.cat([a, b], 1), exact[name])
    close(earlier[-1], exact["C"])


@pytest.mark.parametrize("module", [reference, fast], ids=lambda m: m.__name__)
def test_prefix(module):
    """The outputs of x[:t] are those of x up to t: no chunk is anchored to the end."""
    for delta in (False, True):
        tensors = linear_inputs(1, 100, 4, 2, 8, "vector", delta)
        o = getattr(module, op(tensors))(**tensors)[0]
        for t in (1, 7, 16, 33, 99):
            close(getattr(module, op(tensors))(**{n: x[:, :t] for n, x in tensors.items()})[0], o[:, :t])


@pytest.mark.parametrize("module", [reference, fast], ids=lambda m: m.__name__)
def test_ten_thousand_steps(module):
    """Case 18: S = 0.999 S + 0.001 ends at 1 from bfloat16 inputs too: the state is never bfloat16."""
    one = torch.ones(1, 10_000, 1, 1, dtype=torch.bfloat16)
    for v, log_a in ((one * 0.001, torch.full((1, 10_000, 1), math.log(0.999))), (one, torch.zeros(1, 10_000, 1))):
        o, C = module.scan(one, one, v, log_a)
        assert C.dtype == torch.float32
        expected = v[0, 0, 0, 0].item() * (1000 * (1 - 0.999**10_000) if log_a[0, 0, 0] else 10_000)
        assert abs(C.item() - expected) < 1e-3 * expected and abs(o[0, -1].item() - expected) < 1e-2 * expected


@pytest.mark.parametrize("module", [reference, fast], ids=lambda m: m.__name__)
def test_gated_delta_known_values(module):
    """Case 19: decay first, then the correction: 0.5, 0.625 (the other order gives 0.5, 0.5)."""
    one = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    o, _ = module.delta(one, one / 2, one, one[..., 0] * math.log(0.5), -one / 4, one)
    assert o.flatten().tolist() == [0.5, 0.625]


# ---------------------------------------------------------------- all of them


MAKE = {"attend": attend_inputs, "mlstm": mlstm_inputs, "scan": linear_inputs,
        "delta": lambda *sizes: linear_inputs(*sizes, delta=True)}
OPTIONS = {"attend": dict(window=9, keep=3)}


@pytest.mark.parametrize("name", MAKE)
def test_packed_documents(name):
    """Case 15: what another document of the row holds leaves a document bit-identical."""
    segment = torch.repeat_interleave(torch.arange(4), torch.tensor([5, 70, 1, 64]))[None]
    options = OPTIONS.get(name, {})
    tensors = MAKE[name](1, 140, 6, 3, 8)
    other = {n: torch.cat([x[:, :5], x[:, 5:75].flip(1), x[:, 75:]], 1) if x.ndim > 1 else x for n, x in tensors.items()}
    a, b = (getattr(fast, name)(**x, **options, segment=segment) for x in (tensors, other))
    a, b = (a, b) if name == "attend" else (a[0], b[0])
    assert torch.equal(a[:, :5], b[:, :5]) and torch.equal(a[:, 75:], b[:, 75:]) and not torch.equal(a, b)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("module", [reference, fast], ids=lambda m: m.__name__)
def test_memory_layout(name, module):
    """Case 17: transposed, sliced and expanded inputs and output gradients give what contiguous ones give."""
    plain, options = MAKE[name](2, 150, 6, 3, 8), OPTIONS.get(name, {})
    plain["k"], plain["v"] = (plain[n][:, :, :1].expand(-1, -1, 3, -1).contiguous() for n in "kv")
    strange = {n: x.transpose(0, -1).contiguous().transpose(0, -1) for n, x in plain.items()}
    strange["k"] = plain["k"][:, :, :1].expand(-1, -1, 3, -1)                    # stride 0
    strange["v"] = torch.stack([plain["v"], plain["v"] * 0], -1).flatten(3)[..., ::2]
    assert strange["k"].stride(2) == 0 and not (strange["v"].is_contiguous() or strange["q"].is_contiguous())
    do, results = draw(9, 1, 150, 6, 1).expand(2, -1, -1, plain["v"].shape[-1]), []
    for tensors, do in ((plain, do.contiguous()),
                        (strange, do)):
        tensors = {n: x.requires_grad_() for n, x in tensors.items()}
        out = getattr(module, name)(**tensors, **options)
        out = out if name == "attend" else out[0]
        results.append([out, *torch.autograd.grad(out, list(tensors.values()), do)])
    for got, want in zip(results[1], results[0]):
        close(got, want)


# ---------------------------------------------------------------- distill_loss


both = pytest.mark.parametrize("module", [reference, fast], ids=lambda m: m.__name__)


def loss_and_gradients(module, hidden, weight, target, dtype=torch.float64, **options):
    leaves = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
    target = target.to(dtype) if torch.is_tensor(target) else tuple(x.to(dtype) if x.is_floating_point() else x for x in target)
    loss = module.distill_loss(*leaves, target, **options)
    return [loss, *torch.autograd.grad(1.7 * loss, leaves)]


@pytest.fixture
def tiles(monkeypatch):
    """Slices of 5 of the vocabulary's 23 ids, the last one of 3."""
    monkeypatch.setattr(fast, "TILE", 5 * 11)


@pytest.mark.parametrize("ce", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("target", ["logits", "top", "head"])
def test_distill_loss(tiles, target, temperature, ce):
    """fast against the plain loss, with every form of the teacher; float32 and bfloat16 too."""
    M, E, V = 11, 6, 23
    hidden, weight, labels = 3 * draw(0, M, E), draw(1, V, E), torch.arange(M) * 2
    given = {"logits": 4 * draw(2, M, V), "top": (4 * draw(2, M, V)).topk(7), "head": (3 * draw(2, M, 4), draw(3, V, 4))}[target]
    options = dict(labels=labels, ce=ce, temperature=temperature)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        numbers = [x.to(dtype) for x in (hidden, weight)]
        given_ = given.to(dtype) if torch.is_tensor(given) else tuple(x.to(dtype) if x.is_floating_point() else x for x in given)
        exact = loss_and_gradients(reference, *numbers, given_, **options)
        got, same = (loss_and_gradients(module, *numbers, given_, dtype, **options) for module in (fast, reference))
        assert got[0].dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
        for j, (x, y, z) in enumerate(zip(got, exact, same)):
            close(x.to(got[0].dtype), y, z, 3 if j else 2)


@both
@pytest.mark.parametrize("top", [False, True])
def test_distill_loss_known_value(module, top, monkeypatch):
    """Uniform teacher, student (.7, .1, .1, .1): method.md, section 11."""
    monkeypatch.setattr(fast, "TILE", 3)
    student, target = torch.tensor([[0.7, 0.1, 0.1, 0.1]], dtype=torch.float64).log(), torch.zeros(1, 4, dtype=torch.float64)
    eye = torch.eye(4, dtype=torch.float64)
    loss, gradient, _ = loss_and_gradients(module, student, eye, target.topk(4) if top else target)
    assert loss.item() == pytest.approx(0.429813, abs=5e-7)
    assert gradient[0].tolist() == pytest.approx([1.7 * 0.45] + 3 * [1.7 * -0.15])


@both
def test_distill_loss_limits(module, monkeypatch):
    """A student equal to its teacher, logits of 1e4, no tokens."""
    monkeypatch.setattr(fast, "TILE", 10)
    hidden, weight = draw(0, 5, 4), draw(1, 7, 4)
    loss, *gradients = loss_and_gradients(module, hidden, weight, (hidden, weight))
    assert abs(loss.item()) < 1e-12 and all(g.abs().max() < 1e-12 for g in gradients)
    huge = torch.tensor([[1e4, -1e4, 0.0]], dtype=torch.float64)
    results = loss_and_gradients(module, huge, torch.eye(3, dtype=torch.float64), -huge, torch.float32, labels=torch.tensor([0]), ce=0.5)
    assert all(x.isfinite().all() for x in results)
    nothing = loss_and_gradients(module, hidden[:0], weight, (hidden[:0], weight), labels=torch.zeros(0, dtype=torch.long), ce=0.5)
    assert nothing[0].item() == 0 and all((g == 0).all() for g in nothing[1:])


@both
@pytest.mark.parametrize("changes, words", [
    (dict(ce=-0.1), "ce -0.1"), (dict(ce=1.1), "ce 1.1"), (dict(temperature=0.0), "temperature 0"), (dict(ce=0.5), "needs labels"),
    (dict(ce=0.5, labels=torch.tensor([0, 1, 2, 3, 7])), "from 0 to 6"), (dict(ce=0.5, labels=torch.tensor([0, 1, 2, 3, -100])), "from 0 to 6"),
    (dict(ce=0.5, labels=torch.zeros(4, dtype=torch.long)), "5 ids"), (dict(target=torch.zeros(5, 8)), "(5, 8)"),
    (dict(target=(torch.zeros(5, 3), torch.zeros(8, 3))), "a vocabulary of 7"), (dict(target=(torch.zeros(4, 3), torch.zeros(7, 3))), "5 tokens"),
    (dict(target=torch.zeros(4, 7).topk(2)), "5 tokens")], ids=str)
def test_distill_loss_refuses(module, changes, words, monkeypatch):
    monkeypatch.setattr(fast, "TILE", 10)
    with pytest.raises(ValueError) as caught:
        module.distill_loss(**dict(hidden=draw(0, 5, 4), weight=draw(1, 7, 4), target=draw(2, 5, 7)) | changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)


class Largest(TorchDispatchMode):
    """The most numbers that any one tensor had."""

    numbers = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **kwargs or {})
        self.numbers = max([self.numbers, *(x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(out) if torch.is_tensor(x))])
        return out


@pytest.mark.parametrize("target", ["logits", "top", "head"])
def test_distill_loss_never_holds_all_logits(target, monkeypatch):
    M, V, E = 30, 200, 4
    monkeypatch.setattr(fast, "TILE", 30 * 16)
    hidden, weight = draw(0, M, E).requires_grad_(), draw(1, V, E).requires_grad_()
    given = {"logits": draw(2, M, V), "top": draw(2, M, V).topk(7), "head": (draw(2, M, 4), draw(3, V, 4))}[target]
    largest = {}
    for module in (reference, fast):
        with Largest() as seen:
            module.distill_loss(hidden, weight, given, torch.arange(M), ce=0.3).backward()
        largest[module] = seen.numbers
    assert largest[reference] >= M * V
    assert largest[fast] <= (M * V if target == "logits" else V * E), "the teacher's own logits are given, everything else is small"


def test_distill_loss_gradients_once(tiles):
    """None are made without a graph; a second backward pass would hand out what the first one scaled."""
    hidden, weight, target = draw(0, 11, 6).requires_grad_(), draw(1, 23, 6).requires_grad_(), draw(2, 11, 23)
    with torch.no_grad():
        assert not fast.distill_loss(hidden, weight, target).requires_grad
    loss = fast.distill_loss(hidden, weight, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed out already"):
        loss.backward()


def test_distill_loss_scaled_float16(tiles):
    """A loss scale of 65,536 is more than float16 holds; the scaled gradients are not."""
    numbers = [x.half() for x in (draw(0, 11, 6), draw(1, 23, 6), draw(2, 11, 23))]
    results = []
    for module, dtype in ((reference, torch.float64), (fast, torch.float16), (reference, torch.float16)):
        hidden, weight, target = (x.to(dtype) for x in numbers)
        loss = module.distill_loss(hidden.requires_grad_(), weight.requires_grad_(), target)
        results.append(torch.autograd.grad(65536 * loss, (hidden, weight)))
    for exact, got, same in zip(*results):
        assert got.dtype == torch.float16
        close(got, exact, same, 3)


def test_distill_loss_frozen_head(tiles):
    """A head or hidden states that need no gradient get none."""
    hidden, weight, target = draw(0, 11, 6), draw(1, 23, 6), draw(2, 11, 23)
    for leaf in (hidden, weight):
        leaf.requires_grad_()
        gradients = [torch.autograd.grad(module.distill_loss(hidden, weight, target), leaf) for module in (fast, reference)]
        close(gradients[0][0], gradients[1][0])
        leaf.requires_grad_(False)


# ---------------------------------------------------------------- autocast


@pytest.mark.parametrize("name", MAKE)
def test_autocast_lowers_nothing(name):
    """float32 inputs give the same bits under bfloat16 autocast; one bfloat16 input among them is raised."""
    tensors, results = {n: x.float() for n, x in MAKE[name](2, 70, 6, 3, 8).items()}, []
    for enabled in (False, True):
        leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            o = getattr(fast, name)(**leaves)
        o = o if torch.is_tensor(o) else o[0]
        results.append([o, *torch.autograd.grad(o.square().sum(), list(leaves.values()))])
    assert all(torch.equal(*pair) for pair in zip(*results))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = getattr(fast, name)(**{n: x.bfloat16() if n == "v" else x for n, x in tensors.items()})
    assert (mixed if torch.is_tensor(mixed) else mixed[0]).dtype == torch.float32


@every_row
def test_training_under_autocast(row, tiles):
    """As on CUDA: float32 weights, bfloat16 products; every gradient is there and finite."""
    missing = []
    for enabled in (False, True):
        model, tokens = decoder(row, dtype=torch.float32, ops=fast), draw_tokens(2, 70)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = fast.distill_loss(model.hidden(tokens)[:, 1:].flatten(0, 1), model.head_weight, draw(0, 138, 41).float())
        loss.backward()
        assert loss.dtype == torch.float32
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        missing.append([n for n, p in model.named_parameters() if p.grad is None])
    assert missing[1] == missing[0] and not any("norm" not in n for n in missing[0]), "only norms that a row leaves out get none"


# ---------------------------------------------------------------- python fast.py


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's, where NX-AI imports Triton
def test_bench(monkeypatch, capsys):
    """It checks, then times, and its last line is JSON."""
    monkeypatch.setattr(bench, "CHECKS", bench.CHECKS[::9])
    monkeypatch.setattr("sys.argv", ["fast.py", "--quick", "--device", "cpu"])
    bench.main()
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["checks"] == "passed" and not any("FAILED" in line for line in lines)
    assert {row["op"] for row in result["times"]} == set(OPS)
    assert all(row["seconds"] > 0 and (row["ratio"] == 1) == (row["peer"] == "ours") for row in result["times"])
    assert {"attend_growth", "decode_growth", "training_ratio"} <= result.keys()


def test_bench_times_nothing_that_fails(monkeypatch, capsys):
    """An error of one per mille in one op stops it before any timing."""
    right = fast.scan
    monkeypatch.setattr(fast, "scan", lambda q, *args, **kwargs: right(1.001 * q, *args, **kwargs))
    monkeypatch.setattr(bench, "CHECKS", [c for c in bench.CHECKS if c[0] in ("attend", "scan")][-3:])
    monkeypatch.setattr("sys.argv", ["fast.py", "--quick", "--device", "cpu"])
    refused(bench.main, "nothing is timed")
    lines = capsys.readouterr().out.splitlines()
    assert any("FAILED" in line for line in lines) and json.loads(lines[-1])["checks"] == "failed"


def test_bench_outlives_a_broken_peer(monkeypatch, capsys):
    """A peer that raises is a line of the table; so is a part of the bench."""
    def broken(*args, **kwargs):
        raise RuntimeError("no such kernel")
    monkeypatch.setattr(bench, "CHECKS", bench.CHECKS[:1])
    monkeypatch.setattr(bench, "TIMED", {"quick": [bench.TIMED["quick"][0]]})
    monkeypatch.setattr(bench, "rates", lambda *args: (1e9, 1e9))
    monkeypatch.setattr(reference, "attend", broken)
    monkeypatch.setattr(bench, "check", lambda *args: True)
    monkeypatch.setattr(bench, "bench_decode", broken)
    broken.__name__ = "bench_decode"
    monkeypatch.setattr(bench, "bench_constant", lambda *args: {"attend_growth": 4.0})
    monkeypatch.setattr("sys.argv", ["fast.py", "--quick", "--device", "cpu"])
    bench.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["peer"]: row for row in result["times"]}
    assert "no such kernel" in rows["reference.py"]["failed"] and rows["PyTorch, masked"]["ratio"] > 0 and "seconds" in rows["ours"]
    assert "no such kernel" in result["bench_decode"] and result["attend_growth"] == 4.0


@every_row
def test_decoder_on_fast_ops(row):
    """The whole model: logits and gradients of packed documents, and decoding in pieces."""
    models = [decoder(row, window=9, ops=ops) for ops in (None, fast)]
    tokens, segment = draw_tokens(2, 150), documents(2, 150)
    results = []
    for model in models:
        logits = model(tokens, segment=segment)
        logits.square().mean().backward()
        results.append([logits] + [p.grad for p in model.parameters() if p.grad is not None])
    for got, want in zip(results[1], results[0], strict=True):
        close(got, want)
    (exact, cache), (got, cache2) = (read_pieces(model, tokens, 67) for model in models)
    close(got, exact)
    same_cache(cache2, cache)


def test_decode_step():
    """Step after step it writes what the whole model, run over all tokens so far, finds most likely."""
    model = decoder(VARIANTS["bifocal"], dtype=torch.float32, ops=fast)
    for make in (fast.decode_step, fast.decode_graph):  # on a CPU the same
        text = [3]
        token = torch.tensor([text])
        step = make(model, token, model.cache(1, dtype=torch.float32))
        for _ in range(20):
            step()
            text.append(token.item())
        with torch.no_grad():
            assert model(torch.tensor([text]))[0, :-1].argmax(-1).tolist() == text[1:]
        assert len(set(text)) > 2


@pytest.mark.parametrize("changes", [dict(k=torch.zeros(2, 6, 2, 8), v=torch.zeros(2, 6, 2, 8)), dict(q=torch.zeros(2, 5, 3, 8)),
                                     dict(v=torch.zeros(2, 5, 1, 8)), dict(k=torch.zeros(2, 5, 2, 4)), dict(q=torch.zeros(2, 5, 4))],
                         ids=["time", "grouping", "heads", "head dim", "dims"])
@pytest.mark.parametrize("name", MAKE)
@both
def test_refused_sizes(module, name, changes):
    """Every op names the sizes that do not fit; none cuts or broadcasts them."""
    tensors = {n: x.float() for n, x in MAKE[name](2, 5, 4, 2, 8).items() if n != "state"} | changes
    with pytest.raises(ValueError) as caught:
        getattr(module, name)(**tensors, **dict(window=3) if name == "attend" else {})
    assert name in str(caught.value) and str(tuple(tensors["q"].shape)) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", MAKE)
@both
def test_half_precision_in_and_out(module, name):
    """o has the inputs' dtype, as the kernels' has; a state is float32."""
    tensors = {n: x.bfloat16() for n, x in MAKE[name](2, 5, 4, 2, 8).items() if n not in ("state", "C", "n", "m")}
    out = getattr(module, name)(**tensors)
    o, state = (out, ()) if name == "attend" else out
    assert o.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in (state if isinstance(state, tuple) else (state,)))


@pytest.mark.parametrize("module", [reference, fast])
def test_segment_numbers_may_come_back(module):
    """A document begins where the number changes, whatever numbers came before."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 150, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    lengths = (40, 70, 40)
    again, apart = (torch.tensor(numbers).repeat_interleave(torch.tensor(lengths))[None] for numbers in ([3, 1, 3], [0, 1, 2]))
    for options in (dict(window=20), dict(window=5, keep=2), dict()):
        assert torch.equal(module.attend(q, k, v, segment=again, **options), module.attend(q, k, v, segment=apart, **options))
