"""The reference: the three faces of every row agree, and every op keeps what its docstring says.

    python -m pytest tests/test_reference.py
"""

import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import reference
from common import (ROWS, SHAPE, B, T, W, close, changed, decoder, draw_tokens, every_row, read_pieces, refused, row_of,
                    same_cache)
from reference import (BUDGET, FARS, PRESETS, QWEN3_4B, VARIANTS, Decoder, Variant, attend, build, check_variant,
                       combine,
                       find_variant, generate, layer_cache, memory_row, mlstm, mlstm_state, rotary_table,
                       rotate, slot_positions, solve_window)

INF = math.inf
MLSTM = FARS["mlstm"]
DOUBLE = dict(dtype=torch.float64)


def draw(*size, grad=False, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), **DOUBLE).requires_grad_(grad)


# ---------------------------------------------------------------- whole = pieces = steps


@every_row
@pytest.mark.parametrize("piece", [1, W - 1, W, W + 1, 2 * W + 3, T])
def test_pieces_equal_whole(row, piece):
    """Logits do not depend on how the sequence is cut, nor do the states (case 4; two layers: case 7)."""
    model, tokens = decoder(row), draw_tokens(B, T)
    logits, cache = read_pieces(model, tokens, piece)
    close(logits, model(tokens))
    same_cache(cache, read_pieces(model, tokens, T)[1])
    assert cache.seen.tolist() == [T] * B


@every_row
def test_prompt_then_ten_steps(row):
    """Case 3: a prompt of 3W+5, then ten steps; the position keeps counting past W."""
    model, tokens = decoder(row), draw_tokens(B, 3 * W + 15)
    exact = model(tokens)
    cache = model.cache(B, **DOUBLE, capacity=3 * W + 15)
    with torch.no_grad():
        close(model(tokens[:, :3 * W + 5], cache=cache), exact[:, :3 * W + 5])
        for t in range(3 * W + 5, 3 * W + 15):
            close(model(tokens[:, t:t + 1], cache=cache), exact[:, t:t + 1])


@every_row
def test_future_does_not_matter(row):
    model, tokens = decoder(row), draw_tokens(B, T)
    other = tokens.clone()
    other[:, 20:] = draw_tokens(B, T - 20, seed=2)
    a, b = model(tokens), model(other)
    close(a[:, :20], b[:, :20])
    assert not torch.equal(a[:, 20:], b[:, 20:])


@every_row
def test_past_beyond_the_window(row):
    """Cutting tokens out of the middle, beyond the reach of two layers of window, changes nothing unless a state
    or the distance to a sink remembers them (case 6: a prefix that is evicted whole)."""
    model, tokens = decoder(row), draw_tokens(B, T)
    shorter = torch.cat([tokens[:, :6], tokens[:, 11:]], 1)
    a, b = model(tokens)[:, -1], model(shorter)[:, -1]
    if row.window and not row.far and (not row.keep or row.sink_positions == "in-cache"):
        close(a, b)
    else:
        assert (a - b).abs().amax(1).min() > 1e-7


@every_row
def test_row_alone_equals_row_in_batch(row):
    model, tokens = decoder(row), draw_tokens(B, T)
    whole = model(tokens)
    for b in range(B):
        close(model(tokens[b:b + 1])[0], whole[b])


@every_row
@pytest.mark.parametrize("piece", [5, T])
def test_different_lengths(row, piece):
    """Case 16: rows padded on the right equal each alone, final states too, and what the padding holds leaves
    no trace; then one more step, which one row sits out."""
    lengths, model = torch.tensor([1, T, 9]), decoder(row)
    tokens, other = draw_tokens(B, T), draw_tokens(B, T, seed=2)
    real = torch.arange(T) < lengths[:, None]
    runs = []
    for padded in (tokens, torch.where(real, tokens, other)):
        cache, logits = model.cache(B, **DOUBLE, capacity=T + 1), []
        with torch.no_grad():
            for start in range(0, T, piece):
                part = padded[:, start:start + piece]
                logits.append(model(part, cache=cache, length=(lengths - start).clamp(0, part.shape[1])))
            logits.append(model(padded[:, -1:], cache=cache, length=torch.tensor([1, 1, 0])))
        runs.append((torch.cat(logits, 1), cache))
    (logits, cache), (logits2, cache2) = runs
    assert torch.equal(logits[:, :T][real], logits2[:, :T][real])
    for a, b in zip(cache.layers, cache2.layers):
        for name in a:
            assert torch.equal(a[name][2], b[name][2])
    for b, length in enumerate(lengths.tolist()):
        alone, single = model.cache(1, **DOUBLE, capacity=T + 1), tokens[b:b + 1]
        with torch.no_grad():
            close(logits[b:b + 1, :length], model(single[:, :length], cache=alone))
            if b < 2:
                close(logits[b:b + 1, -1:], model(single[:, -1:], cache=alone))
        same_cache(row_of(cache, b), alone)
    assert cache.seen.tolist() == [2, T + 1, 9]


@every_row
def test_packed_documents(row):
    """Case 15: documents in one row equal the separate runs; a change in one leaves the next bit-identical."""
    lengths, model = [5, 70, 1, 64], decoder(row)
    tokens = draw_tokens(1, sum(lengths))
    segment = torch.repeat_interleave(torch.tensor([3, 1, 4, 0]), torch.tensor(lengths))[None]
    packed = model(tokens, segment=segment)
    for part, alone in zip(packed.split(lengths, 1), tokens.split(lengths, 1)):
        close(part, model(alone))
    other = tokens.clone()
    other[:, 5:75] = draw_tokens(1, 70, seed=2)
    again = model(other, segment=segment)
    assert torch.equal(again[:, :5], packed[:, :5]) and torch.equal(again[:, 75:], packed[:, 75:])
    assert not torch.equal(again[:, 5:75], packed[:, 5:75])


@every_row
def test_gradients_reach_every_parameter(row):
    model, tokens = decoder(row), draw_tokens(B, T)
    (model(tokens) * draw(B, T, SHAPE.vocab)).sum().backward()
    for name, p in model.named_parameters():
        if row.window is False and not row.far.normed and ("q_norm" in name or "k_norm" in name):
            continue  # the row takes q and k before the teacher's norm
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, name


@every_row
def test_cache_bytes(row):
    """What decoding holds is constant in T and what the memory table says; a state is float32 beside bfloat16."""
    model = build(SHAPE, row, budget=30).bfloat16()
    cache, tokens = model.cache(B, capacity=T), draw_tokens(B, T)
    before = [(name, t.data_ptr(), t.nbytes) for layer in cache.layers for name, t in layer.items()]
    with torch.no_grad():
        for part in tokens.split(9, 1):
            model(part, cache=cache)
    assert before == [(name, t.data_ptr(), t.nbytes) for layer in cache.layers for name, t in layer.items()]
    expected = memory_row(SHAPE, row, 30)["bytes_per_layer"] if row.window is not None else T * 160
    assert cache.bytes_per_layer() == expected
    assert all(t.dtype == (torch.bfloat16 if name in "kv" else torch.float32) for layer in cache.layers for name, t in layer.items())


def test_segment_with_a_cache_is_refused():
    model = decoder(VARIANTS["swa"])
    refused(lambda: model(draw_tokens(1, 3), cache=model.cache(1), segment=torch.zeros(1, 3)), "segment", "cache")


def test_full_cache_that_overflows_is_refused():
    model = decoder(VARIANTS["full"])
    refused(lambda: model(draw_tokens(1, 9), cache=model.cache(1, capacity=8)), "full", "8 tokens", "9")


@pytest.mark.parametrize("row", [row for row in ROWS if (not row.far or row.far.recurrence == "mlstm") and row.mix in (None, "gate")],
                         ids=lambda row: row.name)
def test_layer_equals_its_description(row):
    """The answer of one layer, written head by head from the row's fields; query head h reads kv head h // R."""
    model, x = decoder(row), draw(1, T, SHAPE.width)
    layer, R, D = model.layers[1].self_attn, 2, 8
    context = model.context(torch.zeros(1, T, dtype=torch.long))
    table = rotary_table(torch.arange(T)[None], D, SHAPE.rope_theta, torch.float64)
    q, k, v = (linear(x).view(1, T, -1, D) for linear in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight for y, norm in ((q, layer.q_norm), (k, layer.k_norm)))
    mask = declared(T, W if row.window else None, row.keep)
    distant = rotary_table(torch.arange(T).clamp(max=row.keep + W - 1)[None], D, SHAPE.rope_theta, torch.float64)
    out = []
    for head in range(10):
        h = head // R
        q_, k_, v_ = q[0, :, head], k[0, :, h], v[0, :, h]
        turn = lambda y, table=table: rotate(y[None, :, None], table)[0, :, 0]  # noqa: E731
        a = turn(q_) @ turn(k_).T / D**0.5
        if row.sink_positions == "in-cache":
            a[:, :row.keep] = turn(q_, distant) @ turn(k_)[:row.keep].T / D**0.5
        a = a.masked_fill(~mask, -INF)
        if row.learned_sink:
            a = torch.cat([a, layer.sink[head].expand(T, 1)], 1)
        near = a.softmax(-1)[:, :T] @ v_
        if row.far:
            far, s = layer.far, h if row.far.state_per == "kv" else head
            fq, fk = (turn(q_), turn(k_)) if row.far.rotary == "before" else (q_, k_)
            if row.far.map == "head":
                fq, fk = fq @ far.map_q.weight[head], fk @ far.map_k.weight[s]
            phi = {"softmax": lambda y: y.softmax(-1), "l2": lambda y: y / y.norm(dim=-1, keepdim=True), "identity": lambda y: y}
            fq, fk = phi[row.far.features](fq), phi[row.far.features](fk)
            i = 15 * (far.input_gate(x)[..., s:s + 1] / 15).tanh()
            far = quadratic(fq[None, :, None], fk[None, :, None], v_[None, :, None], i, far.forget_gate(x)[..., s:s + 1],
                            row.far.normalizer, D**-0.5 if row.far.scaled else 1.0)[0, :, 0]
            g = torch.ones(T, **DOUBLE)
            if row.mix == "gate":
                g = torch.sigmoid(torch.cat([q_, k_, v_], 1) @ layer.mix_gate["weight"][head] + layer.mix_gate["bias"][head])
            near = g[:, None] * far + (1 - g[:, None]) * near
        out.append(near)
    close(layer.read(x, context), torch.stack(out, 1)[None])


# ---------------------------------------------------------------- attend


def declared(T, window, keep):
    """[t][s] visible, written as the words say it."""
    W = T if window is None else window
    return torch.tensor([[s <= t and (t - W + 1 <= s or s < keep) for s in range(T)] for t in range(T)])


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("window", [1, 3, 7, None])
def test_gradient_pattern(window, keep):
    """d out[t] / d v[s] is not zero exactly where the window and the sinks say, in the kv head h of query head
    h*R + r alone (case 10)."""
    T, H, Hk, D = 11, 6, 2, 4
    q, k, v = draw(1, T, H, D), draw(1, T, Hk, D, seed=1), draw(1, T, Hk, D, seed=2)
    pattern = torch.autograd.functional.jacobian(lambda v: attend(q, k, v, window=window, keep=keep)[0, :, :, 0], v)
    pattern = (pattern[..., 0, :, :, 0] != 0)                                    # (T, H, S, Hk)
    for head in range(H):
        for kv in range(Hk):
            expected = declared(T, window, keep) if kv == head // 3 else torch.zeros(T, T, dtype=torch.bool)
            assert torch.equal(pattern[:, head, :, kv], expected)


@pytest.mark.parametrize("window, seen", [(3, [1, 2, 3, 3, 3, 3, 3, 3]), (1, [1] * 8), (8, range(1, 9)), (99, range(1, 9)),
                                          (None, range(1, 9))])
def test_uniform_weights(window, seen):
    """Case 1: q = 0 and one-hot values show the weights."""
    q, k, v = torch.zeros(1, 8, 2, 8, **DOUBLE), draw(1, 8, 1, 8), torch.eye(8, **DOUBLE)[None, :, None]
    o = attend(q, k, v, window=window)
    for t, n in enumerate(seen):
        expected = torch.zeros(8, **DOUBLE)
        expected[t - n + 1:t + 1] = 1 / n
        close(o[0, t], expected.expand(2, 8))


def test_uniform_weights_with_a_sink():
    """Case 2: a sink logit of 0 weighs as one more key: a quarter each once a window of 3 is full."""
    q, k, v = torch.zeros(1, 8, 2, 8, **DOUBLE), draw(1, 8, 1, 8), torch.eye(8, **DOUBLE)[None, :, None]
    o = attend(q, k, v, torch.zeros(2, **DOUBLE), window=3)
    for t in range(8):
        n = min(t + 1, 3)
        expected = torch.zeros(8, **DOUBLE)
        expected[t - n + 1:t + 1] = 1 / (n + 1)
        close(o[0, t], expected.expand(2, 8))


def test_short_sequences():
    for T in (0, 1):
        q, k, v = draw(2, T, 6, 4), draw(2, T, 3, 4), draw(2, T, 3, 5)
        o, lse = attend(q, k, v, window=2, keep=1, return_lse=True)
        assert (o.shape, lse.shape) == ((2, T, 6, 5), (2, T, 6))
        close(o, v.repeat_interleave(2, 2))
        assert decoder(VARIANTS["bifocal"])(draw_tokens(2, T)).shape == (2, T, SHAPE.vocab)


def qkv(T=9, grad=False):
    return draw(2, T, 6, 4, grad=grad), draw(2, T, 3, 4, grad=grad, seed=1), draw(2, T, 3, 5, grad=grad, seed=2)


@pytest.mark.parametrize("segment", [None, torch.tensor([[0] * 4 + [1] * 5, [2] * 9])])
def test_attend_equals_a_loop(segment):
    """Softmax over the visible scores and the sink, one query at a time."""
    (q, k, v), q2, sink = qkv(), draw(2, 9, 6, 4, seed=3), draw(6, seed=4)
    o, lse = attend(q, k, v, sink, window=3, keep=2, segment=segment, q_keep=q2, return_lse=True)
    for b in range(2):
        for t in range(9):
            first = next(s for s in range(9) if segment is None or segment[b, s] == segment[b, t])
            see = [s for s in range(first, t + 1) if s > t - 3 or s - first < 2]
            for h in range(6):
                a = torch.stack([k[b, s, h // 2] @ (q2 if s - first < 2 else q)[b, t, h] / 2 for s in see])
                p = torch.cat([a, sink[h:h + 1]]).softmax(0)
                close(lse[b, t, h], a.logsumexp(0))
                close(o[b, t, h], sum(p[j] * v[b, s, h // 2] for j, s in enumerate(see)))


def test_extreme_sinks():
    """-inf is plain attention, +inf gives 0, and a sink far from lse on either side is finite (case 2)."""
    q, k, v = qkv(grad=True)
    plain, lse = attend(q, k, v, window=3, return_lse=True)
    for value, expected in ((-INF, plain), (INF, plain * 0), (lse.min().item() - 100, plain)):
        sink = torch.full((6,), value, **DOUBLE, requires_grad=True)
        o = attend(q, k, v, sink, window=3)
        close(o, expected)
        assert all(g.isfinite().all() for g in torch.autograd.grad(o.sum(), [q, k, v, sink]))
    sink = (lse[0, 5] + 100).detach()
    close(attend(q, k, v, sink, window=3)[0, 5], plain[0, 5] * math.exp(-100))


def test_sink_gradient():
    """Case 8: d sink = -sum_t p_sink (o . do)."""
    (q, k, v), sink = qkv(grad=True), draw(6, grad=True, seed=3)
    o, lse = attend(q, k, v, sink, window=3, keep=1, return_lse=True)
    do = draw(*o.shape, seed=4)
    close(torch.autograd.grad(o, sink, do)[0], -(torch.sigmoid(sink - lse) * (o * do).sum(-1)).sum((0, 1)))
    assert torch.autograd.gradcheck(lambda *x: attend(*x, window=3, keep=1), (q, k, v, sink))


def test_masked_content_does_not_matter():
    """Case 9: keys and values that a row does not see may hold anything, rows that see nothing give 0."""
    q, k, v = qkv()
    o = attend(q, k, v, window=3)
    k2, v2 = k.clone(), v.clone()
    for t in (0, 1, 2, 6, 7, 8):
        k2[:, t], v2[:, t] = 1e30, -1e30
    assert torch.equal(attend(q, k2, v2, window=3)[:, 5], o[:, 5])
    o, lse, peak = reference.attend_masked(q, k, v, torch.zeros(2, 9, 9, dtype=torch.bool), torch.zeros(6, **DOUBLE))
    assert (o == 0).all() and (lse == -INF).all()


def test_ring_holds_the_last_keys():
    """Case 5: W = 8, prefill 6, decode 3: the ring holds the keys of positions 1...8, each in its own slot."""
    model, tokens = decoder(VARIANTS["swa"], window=8), draw_tokens(1, 9)
    cache, whole = model.cache(1, **DOUBLE), decoder(VARIANTS["full"]).cache(1, **DOUBLE, capacity=9)
    with torch.no_grad():
        for part in tokens.split([6, 1, 1, 1], 1):
            model(part, cache=cache)
        decoder(VARIANTS["full"])(tokens, cache=whole)
    positions = slot_positions(cache.seen, 0, 8)[0].tolist()
    assert positions == [8, 1, 2, 3, 4, 5, 6, 7]
    close(cache.layers[0]["k"][0], whole.layers[0]["k"][0, positions])
    assert slot_positions(torch.tensor([2, 3, 12]), 3, 4).tolist() == [
        [0, 1, -1, -1, -1, -1, -1], [0, 1, 2, -1, -1, -1, -1], [0, 1, 2, 11, 8, 9, 10]]


@pytest.mark.parametrize("piece", [None, 1, 5])
def test_in_cache_positions(piece):
    """Case 6: StreamingLLM's own loop: keys are kept un-rotated and rotated at their index in the cache."""
    row, N, W, T = changed("swa_sink_tokens", "in-cache", sink_positions="in-cache"), 4, 4, 21
    model, tokens = decoder(row, window=W), draw_tokens(1, T)
    layer, context, x = model.layers[0].self_attn, model.context(tokens), model.embed_tokens(tokens)
    q = layer.q_norm(layer.q_proj(x).view(T, 10, 8))
    k, v = layer.k_norm(layer.k_proj(x).view(T, 5, 8)), layer.v_proj(x).view(T, 5, 8)

    def turn(x, position):  # (..., 8) as 4 complex numbers
        angle = position * SHAPE.rope_theta ** (-torch.arange(4, **DOUBLE) / 4)
        return torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(4, **DOUBLE), angle)

    kept, out = [], []
    for t in range(T):
        kept.append(t)
        if len(kept) > N + W:
            del kept[N]
        assert t != 9 or kept == [0, 1, 2, 3, 6, 7, 8, 9]
        query = turn(q[t], len(kept) - 1).unflatten(0, (5, 2))                   # (Hk, R, 4)
        keys = torch.stack([turn(k[s], index) for index, s in enumerate(kept)])  # (keys, Hk, 4)
        p = (torch.einsum("hrd,shd->hrs", query, keys.conj()).real / 8**0.5).softmax(-1)
        out.append(torch.einsum("hrs,shd->hrd", p, v[kept]).flatten(0, 1))
    expected = torch.stack(out)[None]
    if piece is None:
        got = layer.read(x, context)
    else:
        cache, got = model.cache(1, **DOUBLE), []
        with torch.no_grad():
            for part in tokens.split(piece, 1):
                got.append(layer.read(model.embed_tokens(part), model.context(part, None, cache), cache.layers[0]))
                cache.seen += part.shape[1]
        got = torch.cat(got, 1)
    close(got, expected)
    original = decoder(VARIANTS["swa_sink_tokens"], window=W)
    other = original.layers[0].self_attn.read(x, original.context(tokens))
    close(other[:, :N + W], expected[:, :N + W])  # the two readings agree until the first eviction
    assert (other - expected)[:, N + W:].abs().amax((2, 3)).min() > 1e-4


# ---------------------------------------------------------------- mlstm


def gated(T=23, Hs=3, grad=False, B=2, H=6, D=5):
    """q, k, v, i, f; a state per head of k."""
    make = lambda seed, *size: draw(B, T, *size, grad=grad, seed=seed)  # noqa: E731
    return [make(1, H, D), make(2, Hs, D), make(3, Hs, D), make(4, Hs), make(5, Hs)]


def quadratic(q, k, v, i, f, normalizer="floor", scale=None):
    """The recurrence unrolled and unstabilised: weights e^{F_t - F_s + i_s} q_t . k_s, denominator max(|sum|, 1)."""
    R, D = q.shape[2] // k.shape[2], q.shape[3]
    k, v, i, f = (x.repeat_interleave(R, 2) for x in (k, v, i, f))
    Fs = F.logsigmoid(f).cumsum(1)
    weight = (Fs[:, :, None] - Fs[:, None] + i[:, None]).exp()                   # (B, T, S, H)
    causal = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()[None, :, :, None]
    a = torch.einsum("bthd,bshd->btsh", q, k) * (D**-0.5 if scale is None else scale) * weight.masked_fill(~causal, 0)
    total = a.sum(2)
    total = total if normalizer == "plain" else total.abs().clamp(min=1)
    return torch.einsum("btsh,bshd->bthd", a, v) / total[..., None]


@pytest.mark.parametrize("m0", [0.0, -INF, -3.0])
@pytest.mark.parametrize("Hs", [3, 6])
@pytest.mark.parametrize("normalizer, scale", [("floor", None), ("floor", 1.0), ("plain", None)])
def test_mlstm_equals_quadratic_form(m0, Hs, normalizer, scale):
    """Whatever the empty state's stabiliser (it cancels)."""
    q, k, v, i, f = gated(Hs=Hs)
    if normalizer == "plain":
        q, k = q.abs(), k.abs()
    o, (C, n, m) = mlstm(q, k, v, i * 3, f * 2, normalizer=normalizer, scale=scale, m0=m0)
    close(o, quadratic(q, k, v, i * 3, f * 2, normalizer, scale))
    decay = F.logsigmoid(f * 2).cumsum(1)
    weight = (decay[:, -1:] - decay + i * 3).exp()
    close(C * m.exp()[..., None, None], torch.einsum("bsh,bshd,bshe->bhde", weight, k, v))
    close(n * m.exp()[..., None], torch.einsum("bsh,bshd->bhd", weight, k))


def test_sigmoid_input_gate():
    """[X]'s other form, without a stabiliser and with floor 1, is i = logsigmoid(i~)."""
    q, k, v, i, f = gated()
    o, _ = mlstm(q, k, v, F.logsigmoid(i), f)
    C, n = torch.zeros(2, 3, 5, 5, **DOUBLE), torch.zeros(2, 3, 5, **DOUBLE)
    for t in range(q.shape[1]):
        f_, i_ = f[:, t].sigmoid(), i[:, t].sigmoid()
        C = f_[..., None, None] * C + i_[..., None, None] * torch.einsum("bhd,bhe->bhde", k[:, t], v[:, t])
        n = f_[..., None] * n + i_[..., None] * k[:, t]
        q_ = q[:, t].unflatten(1, (3, 2)) * 5**-0.5
        floor = torch.einsum("bhrd,bhd->bhr", q_, n).abs().clamp(min=1)
        close(o[:, t].unflatten(1, (3, 2)), torch.einsum("bhrd,bhde->bhre", q_, C) / floor[..., None])


@pytest.mark.parametrize("i, f, expected", [(300, 0, [1, 5 / 3, 17 / 7, 49 / 15]), (300, 60, [1, 1.5, 2, 2.5]),
                                            (0, 60, [1, 1.5, 2, 2.5]), (0, -700, [1, 2, 3, 4])])
def test_mlstm_known_values(i, f, expected):
    """Case 13, D = 1, q = k = 1, v = 1, 2, 3, 4."""
    one = torch.ones(1, 4, 1, 1, **DOUBLE)
    v = torch.arange(1.0, 5, **DOUBLE).reshape(1, 4, 1, 1)
    o, _ = mlstm(one, one, v, i * one[..., 0], f * one[..., 0])
    close(o.flatten(), torch.tensor(expected, **DOUBLE))


def test_mlstm_short_sequences():
    q, k, v, i, f = gated()
    state = mlstm(q, k, v, i, f)[1]
    o, same = mlstm(*(x[:, :0] for x in (q, k, v, i, f)), state=state)
    assert o.shape == (2, 0, 6, 5) and all(torch.equal(a, b) for a, b in zip(same, state))
    o, (C, n, m) = mlstm(*(x[:, :1] for x in (q, k, v, i, f)))
    inner = (q[:, :1] * k[:, :1].repeat_interleave(2, 2)).sum(-1, keepdim=True) * 5**-0.5 * i[:, :1].repeat_interleave(2, 2)[..., None].exp()
    close(o, inner / inner.abs().clamp(min=1) * v[:, :1].repeat_interleave(2, 2))


def test_mlstm_gradient_through_the_state():
    """Case 14: two segments of back-propagation equal one, the state's gradient handed over by hand."""
    inputs, do = gated(grad=True), draw(2, 23, 6, 5, seed=6)
    dstate = [draw(*x.shape, seed=7) for x in mlstm_state(2, 3, 5)]
    o, state = mlstm(*inputs)
    exact = torch.autograd.grad([o, *state], inputs, [do, *dstate])
    first, second = ([x.detach()[:, part].requires_grad_() for x in inputs] for part in (slice(9), slice(9, None)))
    o1, state1 = mlstm(*first)
    middle = tuple(x.detach().requires_grad_() for x in state1)
    o2, state2 = mlstm(*second, state=middle)
    close(torch.cat([o1, o2], 1), o)
    later = torch.autograd.grad([o2, *state2], [*second, *middle], [do[:, 9:], *dstate])
    earlier = torch.autograd.grad([o1, *state1], first, [do[:, :9], *later[5:]])
    for a, b, whole in zip(earlier, later, exact):
        close(torch.cat([a, b], 1), whole)


def test_mlstm_padded_step():
    """i = -inf, f = +inf neither decays nor writes, bit for bit."""
    q, k, v, i, f = gated()
    state = mlstm(q, k, v, i, f)[1]
    padded = mlstm(q, k, v, torch.full_like(i, -INF), torch.full_like(f, INF), state=state)[1]
    assert all(torch.equal(a, b) for a, b in zip(padded, state))


@pytest.mark.parametrize("module", ["reference", "fast"])
def test_state_is_never_bfloat16(module):
    """Case 18: 10,000 steps of S = 0.999 S + 0.001 end at 1 (a bfloat16 state sticks at 0.5)."""
    op = __import__(module).mlstm
    one = torch.ones(1, 10000, 1, 1, dtype=torch.bfloat16)
    i, f = one[..., 0] * math.log(0.001), one[..., 0] * math.log(999)
    o, (C, n, m) = op(one, one, one, i, f)
    assert C.dtype == n.dtype == m.dtype == torch.float32
    exact = i[0, 0].double().exp() / torch.sigmoid(-f[0, 0].double())
    exact = exact * (1 - torch.sigmoid(f[0, 0].double()) ** 10000)
    assert abs((n * m.exp()).item() - exact.item()) < 1e-3 and abs(exact.item() - 1) < 0.01


def test_mlstm_unknown_normalizer():
    with pytest.raises(ValueError, match="none.*floor"):
        mlstm(*gated(), normalizer="none")


# ---------------------------------------------------------------- variants, memory


@pytest.mark.parametrize("fields", [
    dict(sink_positions="cached"), dict(mix="gate"), dict(far=MLSTM), dict(far=MLSTM, mix="quarter"), dict(keep=-1),
    dict(window=False), dict(window=False, far=MLSTM, keep=4), dict(window=False, far=MLSTM, learned_sink=True),
    dict(window=False, far=MLSTM, mix="gate"), dict(far=MLSTM, mix="shared"), dict(window=None, keep=3),
    dict(state_per="layer"), dict(features="cosine"), dict(normalizer="none"), dict(normalizer="plain"), dict(decay="key"),
    dict(write="one"), dict(recurrence="scan"), dict(recurrence="delta"), dict(extra="bonus"), dict(left=True),
    dict(rotary="middle"), dict(output_norm="batch"), dict(output_gate="tanh"), dict(inputs="y"), dict(map="full")], ids=str)
def test_rows_that_make_no_sense_are_refused(fields):
    odd = fields.keys() - Variant.__dataclass_fields__.keys()
    row = Variant("odd", "", window=False, far=dataclasses.replace(MLSTM, **fields)) if odd else Variant("odd", "", **fields)
    refused(lambda: check_variant(row), "odd")
    refused(lambda: Decoder(SHAPE, row, W), "odd")


@every_row
def test_rows_that_make_sense_are_not(row):
    check_variant(row)


def test_rows_from_the_command_line():
    def same(row, name, **fields):  # but for the note, which says what was changed
        return dataclasses.replace(row, note="") == dataclasses.replace(VARIANTS["bifocal"], name=name, note="", **fields)

    settings = ["keep=4", "sink_positions=in-cache", "strict=true", "learned_sink=False", "rotary=before", "normed=false"]
    far, gdn = dataclasses.replace(VARIANTS["bifocal"].far, rotary="before", normed=False), dataclasses.replace(FARS["gdn"], state_per="kv")
    row = combine("bifocal", settings=settings)
    assert same(row, "+".join(["bifocal", *settings]), keep=4, sink_positions="in-cache", strict=True, learned_sink=False, far=far)
    assert all(setting in row.note for setting in settings)
    assert same(combine("bifocal", far="none"), "bifocal+none", far=None, mix=None)
    assert same(combine("bifocal", far="gdn"), "bifocal+gdn", far=gdn) and "gdn" in combine("bifocal", far="gdn").note
    assert combine("swa", far="gdn", mix="half") == Variant("swa+gdn+half", "swa with the far part gdn; changed: mix=half",
                                                            far=FARS["gdn"], mix="half")
    assert combine("gdn", mix="gate").window is True and combine("gdn", settings=["rotary=none"]).far == VARIANTS["gdn"].far


@pytest.mark.parametrize("setting", ["keep", "keep=", "keep=four", "keep=none", "keep=true", "learned_sink=no", "window=5",
                                     "name=other", "colour=red", "features=cosine", "learned_sink=", "far=gdn", "left=1", "left=none"])
def test_rows_that_cannot_be_read(setting):
    refused(lambda: combine("bifocal", settings=[setting]), setting.split("=")[0])


def test_user_errors():
    refused(lambda: find_variant("swaa"), "swaa", *VARIANTS)
    refused(lambda: build(SHAPE, "swaa"), "swaa")
    refused(lambda: build(SHAPE, "full", window=5), "--window 5", "full")
    refused(lambda: build(SHAPE, "mlstm", window=5), "--window 5", "mlstm")
    refused(lambda: Decoder(SHAPE, VARIANTS["swa"]), "swa", "window")
    refused(lambda: build(SHAPE, "swa", window=0), "swa", "window")
    refused(lambda: layer_cache(SHAPE, VARIANTS["full"], None), "full", "room")


@pytest.mark.parametrize("name", [name for name, row in VARIANTS.items() if row.window is not None])
def test_budget_too_small(name):
    """The message names the least budget, and that one works."""
    with pytest.raises(reference.UserError, match="--budget 0 is too small.* at least (\\d+) tokens") as caught:
        solve_window(SHAPE, VARIANTS[name], 0)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    assert solve_window(SHAPE, VARIANTS[name], least) == (1 if VARIANTS[name].window else None)
    refused(lambda: solve_window(SHAPE, VARIANTS[name], least - 1), str(least))


def test_published_sums():
    """Qwen3-4B at 576 tokens a layer, against [B]'s numbers."""
    token = reference.token_bytes(QWEN3_4B)
    assert (token, token * 36 / 2**10, 576 * token / 2**20, 576 * token * 36 / 2**20) == (4096, 144, 2.25, 81)
    rows = {name: memory_row(QWEN3_4B, VARIANTS[name], 576) for name in VARIANTS}
    found = {name: (row["window"], round(row["tokens_nominal"], 2), round(row["tokens_exact"], 2)) for name, row in rows.items()
             if row["window"] and not name.startswith(("liger", "lolcats"))}
    assert found == {"swa": (576, 576, 576), "swa_sink_tokens": (572, 576, 576), "swa_learned_sink": (576, 576, 576),
                     "bifocal": (448, 576, 577.01), "bifocal_state": (64, 576, 580.03),
                     "bifocal_strict": (446, 574, 575.01), "bifocal_state_strict": (59, 571, 575.03)}
    assert rows["swa"]["bytes_per_layer"] == 576 * 4096
    assert rows["full"]["bytes_per_layer"] is None


@pytest.mark.parametrize("shape", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("row", [row for row in VARIANTS.values() if row.window], ids=lambda row: row.name)
def test_windows_spend_the_budget(shape, row):
    budget = BUDGET.get(shape.name, 576)
    table = memory_row(shape, row, budget)
    spent = table["tokens_exact" if row.strict else "tokens_nominal"]
    assert spent <= budget < spent + 1
    assert table["window"] == solve_window(shape, row, budget) and table["keep"] == row.keep


def test_parameter_counts():
    V, E, L, H, Hk, D, F = 151936, 2560, 36, 32, 8, 128, 9728
    with torch.device("meta"):
        model = build(QWEN3_4B, "full")
    count = sum(p.numel() for p in model.parameters())
    assert count == V * E + L * (2 * E * H * D + 2 * E * Hk * D + 2 * D + 3 * E * F + 2 * E) + E == 4_022_468_096
    new = {name: memory_row(QWEN3_4B, row, 576)["parameters"] for name, row in VARIANTS.items()}
    assert new["full"] == new["swa"] == new["swa_sink_tokens"] == 0 and new["swa_learned_sink"] == L * H
    mix, q = H * 3 * D + H, H * D * D
    assert new["bifocal"] == L * (H + mix + q + Hk * D * D + 2 * (E + 1) * Hk)
    assert new["bifocal_state"] == L * (H + mix + q + H * D * D + 2 * (E + 1) * H)


@pytest.mark.parametrize("name", PRESETS)
def test_memory_table(name, monkeypatch, capsys):
    """The print-out and its last line, JSON, hold what memory_row says."""
    monkeypatch.setattr("sys.argv", ["reference.py", "--shape", name])
    reference.main()
    text = capsys.readouterr().out
    card, table = json.loads(text.splitlines()[-1]).values()
    with torch.device("meta"):
        assert card["parameters"] == sum(p.numel() for p in Decoder(PRESETS[name], VARIANTS["full"]).parameters())
    assert table == [memory_row(PRESETS[name], row, BUDGET.get(name, 576)) for row in VARIANTS.values()]
    assert all(f"{row['bytes_per_layer']:,}" in text for row in table if row["window"])


@pytest.mark.parametrize("name", VARIANTS)
def test_explain(name, monkeypatch, capsys):
    """Every word of the row is explained, every tensor is listed with its bytes, the picture shows what is kept."""
    monkeypatch.setattr("sys.argv", ["reference.py", "--explain", name])
    reference.main()
    row, (*lines, last) = VARIANTS[name], capsys.readouterr().out.splitlines()
    text, table = "\n".join(lines), json.loads(last)
    assert row.note in text and table["row"]["name"] == name
    for field in ("decay", "write", "features", "map", "output_norm", "output_gate", "inputs", "extra") if row.far else ():
        word = getattr(row.far, field)
        assert word == getattr(reference.Far(), field) or reference.WORDS[field][word] in text
    if row.window is not None:
        window = solve_window(QWEN3_4B, row, 576)
        assert f"together {table['bytes_per_layer']:,} B" in text
        assert (f"W = {window}" in text) == bool(row.window)
    assert ("summary  ~" in text) == bool(row.far) and ("exact    " in text) == (row.window is not False)


# ---------------------------------------------------------------- generation

PROMPTS = [draw_tokens(n, seed=n).tolist() for n in (1, 26, 9)]


@every_row
def test_greedy_is_the_argmax_of_the_whole(row):
    model, ids = decoder(row), list(PROMPTS[1])
    new, cache = generate(model, [ids], 10, cache_dtype=torch.float64)
    for token in new[0]:
        assert token == model(torch.tensor([ids]))[0, -1].argmax()
        ids.append(token)
    assert len(new[0]) == 10 and cache.seen.tolist() == [26 + 9]


@every_row
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_generation_does_not_depend_on_the_batch(row, temperature):
    """Nor on the pieces in which a prompt is read; rows that stopped wait without a trace."""
    model = decoder(row)
    options = dict(temperature=temperature, top_p=0.9, cache_dtype=torch.float64, stop=(3, 8, 11, 19, 30))
    together, cache = generate(model, PROMPTS, 12, seed=5, piece=4, **options)
    for b, prompt in enumerate(PROMPTS):
        alone, single = generate(model, [prompt], 12, seed=5 + b, **options)
        assert together[b] == alone[0]
        if len(alone[0]) < 12:  # its last token was a stop: not read any more
            assert cache.seen[b] == single.seen[0] == len(prompt) + len(alone[0]) - 1
    if temperature:
        assert generate(model, PROMPTS, 12, seed=77, **options)[0] != together


def test_stop_vocab_and_length():
    model = decoder(VARIANTS["bifocal"])
    free = generate(model, PROMPTS, 12, temperature=3.0, cache_dtype=torch.float64)[0]
    assert [len(ids) for ids in free] == [12] * 3 and max(map(max, free)) >= 20
    stopped = generate(model, PROMPTS, 12, temperature=3.0, cache_dtype=torch.float64, stop=(free[1][4],))[0]
    assert stopped[1] == free[1][:free[1].index(free[1][4]) + 1]
    for ids in (generate(model, PROMPTS, 12, temperature=3.0, vocab=20)[0], generate(model, PROMPTS, 12, vocab=20)[0]):
        assert max(map(max, ids)) < 20
    assert generate(model, PROMPTS, 0)[0] == [[], [], []]


def test_small_top_p_is_greedy():
    model = decoder(VARIANTS["swa"])
    greedy = generate(model, PROMPTS, 12)[0]
    assert generate(model, PROMPTS, 12, temperature=0.7, top_p=1e-6)[0] == greedy
    assert generate(model, PROMPTS, 12, temperature=0.7, top_p=1.0)[0] != greedy


def test_sampling_frequencies():
    """An even grid of noise draws each id as often as its probability, cut to the nucleus."""
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    noise = (torch.arange(1000) + 0.5) / 1000
    logits = p.log().expand(1000, 4)
    assert reference.sample(logits, 1.0, noise).bincount(minlength=4).tolist() == [100, 400, 200, 300]
    assert reference.sample(logits, 0.7, noise).bincount(minlength=4).tolist() == [0, 571, 0, 429]
    assert reference.sample(logits, 0.75, noise).bincount(minlength=4).tolist() == [0, 444, 222, 334]


def test_generation_errors():
    model = decoder(VARIANTS["swa"])
    for prompts in ([], [[]], [[1], []]):
        refused(lambda: generate(model, prompts, 3), "prompt is empty")
    for options in (dict(temperature=-1.0), dict(top_p=0.0), dict(top_p=1.5)):
        refused(lambda: generate(model, PROMPTS, 3, **options), "temperature", "top_p")


@every_row
def test_gradients_show_the_declared_visibility(row):
    """d answer[t] / d x[s] != 0 exactly where a row's query t sees s: in the window, as a sink, or through the state."""
    torch.manual_seed(0)
    steps, model = 2 * W + 5, decoder(row)
    context = model.context(torch.zeros(1, steps, dtype=torch.long))
    x = torch.randn(1, steps, SHAPE.width, dtype=torch.float64, requires_grad=True)
    o = model.layers[0].self_attn.read(x, context)
    t, s = torch.arange(steps)[:, None], torch.arange(steps)
    near = (s > t - W) | (s < row.keep) if row.window else torch.full((steps, steps), row.window is None)
    expected = (s <= t) & (near | (row.far is not None))
    for step in range(steps):
        gradient, = torch.autograd.grad(o[0, step].square().sum(), x, retain_graph=True)
        assert torch.equal(gradient[0].abs().amax(-1) != 0, expected[step]), step


@pytest.mark.parametrize("row", [row for row in ROWS if row.window is not None and row.mix not in reference.SHARED], ids=lambda row: row.name)
def test_one_token_asks_nothing_of_the_device(row):
    """A decoding step can be a CUDA graph: with tensors that hold no data, nothing needs a value on the host (no nonzero, no item)."""
    with FakeTensorMode():
        model = Decoder(SHAPE, row, W if row.window else None)
        cache = model.cache(B)
        with torch.no_grad():
            x = model.hidden(torch.zeros(B, 1, dtype=torch.long), cache=cache)
    assert x.shape == (B, 1, SHAPE.width)
