"""Every row of the table against its own description, and every far part beside every mix.

    python -m pytest tests/test_variants.py

The descriptions are written once more, from method and papers, for one query head, one token at a time.
"""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import fast
import reference
from common import SHAPE, close, decoder, draw_tokens, read_pieces, refused, same_cache
from reference import FARS, VARIANTS, WORDS, Attention, Decoder, cache_bytes, combine, layer_cache, memory_row, rotary_table, rotate

T, W, R, H, D, E = 19, 5, 2, SHAPE.heads, SHAPE.head_dim, SHAPE.width


def draw(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------- one layer, in the words of its paper


def low_rank(m, x, act=lambda y: y):
    return act(x @ m.down) @ m.up + m.bias


def recurrence(q, k, v, decay, read="after"):
    """S_t = diag(decay_t) S_{t-1} + k_t v_t^T, and what q_t reads."""
    S, out = torch.zeros(k.shape[1], v.shape[1], dtype=q.dtype), []
    decay = torch.as_tensor(decay, dtype=q.dtype).expand(*k.shape) if not torch.is_tensor(decay) or decay.ndim != 1 else decay[:, None]
    for t in range(len(q)):
        old = S
        S = decay[t, :, None] * S + torch.outer(k[t], v[t])
        out.append(q[t] @ (S if read == "after" else old + torch.outer(read * k[t], v[t])))
    return torch.stack(out)


def normalised(q, k, v, decay=1.0):
    return recurrence(q, k, v, decay) / recurrence(q, k, torch.ones_like(v[:, :1]), decay)


def group_norm(o, weight=1.0, bias=0.0):
    return (o - o.mean(-1, keepdim=True)) / (o.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * weight + bias


def root_norm(o, weight):
    return o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def window_scores(L):
    """q.k / sqrt(D) of the last W keys, rotary, -inf elsewhere."""
    t, s = torch.arange(T)[:, None], torch.arange(T)
    return (L.turn(L.q) @ L.turn(L.k).T / D**0.5).masked_fill((s > t) | (s <= t - W), -math.inf)


def conv(L, silu):
    """q, k, v of one query head after the convolution over 4 tokens."""
    kv = L.head // R
    channels = [slice(L.head * D, (L.head + 1) * D), *(slice((n + kv) * D, (n + kv + 1) * D) for n in (H, H + H // R))]
    out = []
    for y, c in zip((L.q, L.k, L.v), channels):
        y = sum(F.pad(y, (0, 0, d, 0))[:T] * L.far.conv[c, 3 - d] for d in range(4))
        out.append(F.silu(y) if silu else y)
    return out


def linear(L):
    q, k = (F.elu(L.turn(y)) + 1 for y in (L.q, L.k))
    return normalised(q, k, L.v)


def t2r(L):
    q = (L.q @ L.far.map_q.weight[L.head] + L.far.map_q.bias[L.head]).relu()
    k = (L.k @ L.far.map_k.weight[L.head] + L.far.map_k.bias[L.head]).relu()
    o = recurrence(q, k, L.v, 1.0)
    return o / recurrence(q, k, torch.ones_like(L.v[:, :1]), 1.0).clamp(min=1e-6)


def hedgehog_features(L):
    out = []
    for y, m in ((L.q, L.far.map_q), (L.k, L.far.map_k)):
        y = L.turn(y) @ m.weight[L.head]
        assert y.shape[1] == D // 2
        out.append(torch.cat([y.softmax(-1), (-y).softmax(-1)], -1))  # each half sums to one
    return out


def hedgehog(L):
    return normalised(*hedgehog_features(L), L.v)


def supra(L):
    heads = slice(L.head * D, (L.head + 1) * D)
    q, k = (L.turn(m(y.flatten(1))[:, heads].relu()) for m, y in ((L.far.map_q, L.every.q), (L.far.map_k, L.every.k)))
    return group_norm(recurrence(q, k * D**-0.5, L.v, math.exp(-2 ** (-8 * (L.head + 1) / H))))


def dijiang(L):
    heads = torch.linspace(math.log(1 / 32), math.log(1 / 512), H // R, dtype=torch.float64)
    q, k = ((L.turn(y) @ L.far.dct.double()).softmax(-1) for y in (L.q, L.k))
    return group_norm(recurrence(q, k, L.v, 1 - heads[L.head // R].exp())) * F.silu(L.out_gate(L.x))


def qlinatt(L):
    return group_norm(recurrence(L.turn(L.q), L.turn(L.k), L.v, 1.0), L.far.norm_weight[L.head], L.far.norm_bias[L.head])


def mlstm(L):
    q, k = (F.normalize(y @ m.weight[L.head], dim=-1) for y, m in ((L.q, L.far.map_q), (L.k, L.far.map_k)))
    i = (15 * torch.tanh(L.far.input_gate(L.x)[:, L.head] / 15)).exp()
    f = torch.sigmoid(L.far.forget_gate(L.x)[:, L.head])
    n = recurrence(q, k * i[:, None], torch.ones(T, 1, dtype=q.dtype), f)
    return recurrence(q, k * i[:, None], L.v, f) / n.abs().clamp(min=1)


def mamba2(L):
    q, k, v = conv(L, silu=True)
    step = F.softplus(L.far.dt(L.x)[:, L.head])
    o = recurrence(q, k, v * step[:, None], (-L.far.log_A.exp()[L.head] * step).exp()) + L.far.skip[L.head] * v
    return o * F.silu(L.out_gate(L.x))  # the RMS norm spans all heads: see `after`


def mamba2_discrete(L):
    q, k, v = conv(L, silu=False)
    o = recurrence(q, k, v, torch.sigmoid(-L.far.decay(L.x)[:, L.head])) + L.far.skip[L.head] * v
    return o * F.silu(L.out_gate(L.x))


def gla(L):
    a = torch.sigmoid(low_rank(L.far.decay, L.x)[:, L.channels]) ** (1 / 16)
    return root_norm(recurrence(L.q * D**-0.5, L.k, L.v, a), L.far.norm_weight[L.head]) * F.silu(L.out_gate(L.x))


def liger_gla(L):
    far = recurrence(L.q.softmax(-1), L.k.softmax(-1), L.v, torch.sigmoid(L.raw_k) ** (1 / 16))
    return 0.5 * far + 0.5 * window_scores(L).softmax(-1) @ L.v


def rwkv6(L):
    x = L.shifted()
    q, k, v = L.project(x)
    a = torch.exp(-torch.exp(low_rank(L.far.decay, x["decay"], torch.tanh)[:, L.channels]))
    o = recurrence(q, k, v, a, read=L.far.bonus[L.head])
    return group_norm(o, L.far.norm_weight[L.head], L.far.norm_bias[L.head]) * F.silu(L.out_gate(x["gate"]))


def rad_rwkv6(L):
    x = L.shifted()
    q, k, v = L.project(x)
    a = torch.exp(-torch.exp(low_rank(L.far.decay, x["decay"], torch.tanh)[:, L.channels]).clamp(max=5))
    return recurrence(q * D**-0.5, k * (1 - a), v, a) * torch.sigmoid(L.out_gate(x["gate"]))


def removal(q, k, v, a, kappa, rate):
    """RWKV-7: S_t = diag(a) S_{t-1} - (rate kappa)(kappa^T S_{t-1}) + k v^T: what it removes, it reads before the decay."""
    S, out = torch.zeros(D, D, dtype=q.dtype), []
    for t in range(T):
        S = a[t, :, None] * S - torch.outer(rate[t] * kappa[t], kappa[t] @ S) + torch.outer(k[t], v[t])
        out.append(q[t] @ S)
    return torch.stack(out)


def rwkv7(L):
    x = L.shifted()
    q, k, v = L.project(x)
    v = v + (L.first_v - v) * torch.sigmoid(low_rank(L.far.value_gate, x["v"])[:, L.kv_channels])
    a = torch.exp(-math.exp(-0.5) * torch.sigmoid(low_rank(L.far.decay, x["decay"], torch.tanh)[:, L.channels]))
    rate = torch.sigmoid(low_rank(L.far.rate, x["write"])[:, L.channels])
    written = k * (1 + (rate - 1) * L.far.k_a[L.head])
    o = removal(q, written, v, a, F.normalize(k * L.far.k_k[L.head], dim=-1), rate)
    o = group_norm(o, L.far.norm_weight[L.head], L.far.norm_bias[L.head])
    o = o + (q * L.far.bonus[L.head] * written).sum(-1, keepdim=True) * v
    return o * low_rank(L.far.output_gate, x["gate"], torch.sigmoid)[:, L.channels]


def rad_rwkv7(L):
    q, k = L.turn(L.q) * D**-0.5, L.turn(L.k)
    v = L.v + (L.first_v - L.v) * torch.sigmoid(low_rank(L.far.value_gate, L.x)[:, L.kv_channels])
    a = torch.exp(-math.exp(-0.5) * torch.sigmoid(low_rank(L.far.decay, L.x, torch.tanh)[:, L.channels]))
    rate = torch.sigmoid(low_rank(L.far.rate, L.x)[:, L.channels])
    o = removal(q, k * (1 - a + rate), v, a, F.normalize(k, dim=-1), rate)
    return o * low_rank(L.far.output_gate, L.x, torch.sigmoid)[:, L.channels]


def gdn(L):
    """First the decay; then what k gives is taken out and v put in its place, by the share beta."""
    q, k, v = conv(L, silu=True)
    q, k = F.normalize(q, dim=-1) * D**-0.5, F.normalize(k, dim=-1)
    a = (-L.far.log_A.exp() * F.softplus(L.far.dt(L.x))).exp()[:, L.head]
    beta = torch.sigmoid(L.far.beta(L.x)[:, L.head])
    S, out = torch.zeros(D, D, dtype=q.dtype), []
    for t in range(T):
        S = a[t] * S
        S = S + beta[t] * torch.outer(k[t], v[t] - k[t] @ S)
        out.append(q[t] @ S)
    return root_norm(torch.stack(out), L.far.norm_weight[L.head]) * F.silu(L.out_gate(L.x))


def lolcats(L):
    """One normaliser: gamma e^{a - c} for the window's keys, phi(q).phi(k) for those that left it."""
    q, k = hedgehog_features(L)
    a = window_scores(L)
    near = torch.sigmoid(L.layer.gamma[L.head]) * (a - a.amax(-1, keepdim=True)).exp()
    far = (q @ k.T) * (torch.arange(T)[:, None] - W >= torch.arange(T))
    return (near + far) / (near + far).sum(-1, keepdim=True) @ L.v


SAYS = {f.__name__: f for f in (linear, t2r, hedgehog, supra, dijiang, qlinatt, mlstm, mamba2, mamba2_discrete, gla, liger_gla,
                                rwkv6, rad_rwkv6, rwkv7, rad_rwkv7, gdn, lolcats)}


def test_every_far_part_has_a_description():
    assert SAYS.keys() == {row.name for row in VARIANTS.values() if row.far and not row.strict} - {"bifocal", "bifocal_state"}
    assert SAYS.keys() >= FARS.keys()


def seen_by(layer, x, head, first_v):
    """What a description may look at: x (T, E) and the projections of one query head (T, D)."""
    def norm(y, weight):
        return y / (y.square().mean(-1, keepdim=True) + SHAPE.norm_eps).sqrt() * weight

    def every(x_q, x_k, x_v):  # all heads, k and v repeated: (T, H, D)
        q, k, v = (p(y).view(T, -1, D) for p, y in ((layer.q_proj, x_q), (layer.k_proj, x_k), (layer.v_proj, x_v)))
        k, v = k.repeat_interleave(R, 1), v.repeat_interleave(R, 1)
        return SimpleNamespace(q=norm(q, layer.q_norm.weight), k=norm(k, layer.k_norm.weight), v=v, raw_k=k)

    def shifted():
        before = F.pad(x, (0, 0, 1, 0))[:T] - x
        if row.inputs == "lerp":
            return {name: x + before * mu for name, mu in far.shift.items()}
        return {name: x + before * low_rank(m, x + before * far.shift_all, torch.tanh) for name, m in far.shift.items()}

    def project(streams):
        y = every(*(streams[name] for name in "qkv"))
        return y.q[:, head], y.k[:, head], y.v[:, head]

    table = rotary_table(torch.arange(T)[None], D, SHAPE.rope_theta, torch.float64)
    far, row, y = layer.far, layer.row.far, every(x, x, x)
    channels, kv_channels = slice(head * D, (head + 1) * D), slice(head // R * D, (head // R + 1) * D)
    return SimpleNamespace(
        x=x, head=head, layer=layer, far=far, every=y, q=y.q[:, head], k=y.k[:, head], v=y.v[:, head], raw_k=y.raw_k[:, head],
        first_v=first_v[:, head // R] if first_v is not None else None, channels=channels, kv_channels=kv_channels,
        shifted=shifted, project=project, turn=lambda y: rotate(y[None, :, None], table)[0, :, 0],
        out_gate=lambda y: far.output_gate(y)[:, channels])


@pytest.mark.parametrize("name", SAYS)
def test_layer_equals_its_description(name):
    """As a whole and token by token through the cache; the second layer, whose values the first one's may join."""
    model, x, x0 = decoder(VARIANTS[name], window=W), draw(1, T, E), draw(1, T, E, seed=1)
    first, layer = (block.self_attn for block in model.layers)
    context = model.context(torch.zeros(1, T, dtype=torch.long))
    first.read(x0, context)
    with torch.no_grad():
        heads = [SAYS[name](seen_by(layer, x[0], head, None if context.first_v is None else context.first_v[0])) for head in range(H)]
        expected = torch.stack(heads, 1)
        if name == "mamba2":
            expected = expected / (expected.square().mean((1, 2), keepdim=True) + 1e-5).sqrt() * layer.far.norm_weight
        close(layer.read(x, context), expected[None])
        cache, out = model.cache(1, dtype=torch.float64), []
        for t in range(T):
            context = model.context(torch.zeros(1, 1, dtype=torch.long), None, cache)
            first.read(x0[:, t:t + 1], context, cache.layers[0])
            out.append(layer.read(x[:, t:t + 1], context, cache.layers[1]))
            cache.seen += 1
        close(torch.cat(out, 1), expected[None])


# ---------------------------------------------------------------- what must hold whatever the parameters


@pytest.mark.parametrize("name", ["lolcats", "swa+hedgehog+shared", "swa+linear+shared", "swa+t2r+shared"])
@pytest.mark.parametrize("sink", [False, True])
def test_shared_weights_sum_to_one(name, sink):
    """Values of ones come out as ones; a learned sink takes its share."""
    base, *more = name.split("+")
    row = combine(base, *more, settings=[f"learned_sink={sink}"])
    model, context = decoder(row, window=W), None
    layer = model.layers[0].self_attn
    with torch.no_grad():
        layer.v_proj.weight.zero_()
        layer.v_proj.bias.fill_(1)
        o = layer.read(draw(2, T, E), model.context(torch.zeros(2, T, dtype=torch.long)))
    assert (o <= 1 + 1e-12).all() and (o < 1 - 1e-6).all() == sink
    if not sink:
        close(o, torch.ones_like(o))


@pytest.mark.parametrize("gamma", [-9.0, 0.0, 9.0])
def test_lolcats_with_a_window_over_everything_is_softmax_attention(gamma):
    model, full = decoder(VARIANTS["lolcats"], window=T), decoder(VARIANTS["full"])
    x, none = draw(2, T, E), torch.zeros(2, T, dtype=torch.long)
    layer, teacher = model.layers[0].self_attn, full.layers[0].self_attn
    teacher.load_state_dict({n: p for n, p in layer.state_dict().items() if not reference.is_new(n)})
    with torch.no_grad():
        layer.gamma.fill_(gamma)
        close(layer.read(x, model.context(none)), teacher.read(x, full.context(none)))


@pytest.mark.parametrize("name", ["linear", "liger_gla", "qlinatt", "dijiang"])
def test_a_state_per_kv_head_loses_nothing(name):
    """Where the key side has nothing of its own for a query head, its state is its kv head's."""
    settings = ["decay=none"] if name == "dijiang" else []
    pair = [decoder(combine(name, settings=[f"state_per={per}", *settings]), window=W) for per in ("kv", "query")]
    pair[1].load_state_dict(pair[0].state_dict())
    close(*(model(draw_tokens(2, T)) for model in pair))


def test_features_of_zeros():
    """ReLU may leave a query or a past of nothing: the answer is 0, not 0/0; features of any size give the same answer."""
    model, tokens = decoder(VARIANTS["t2r"]), draw_tokens(2, T)
    context, x = model.context(tokens), model.embed_tokens(tokens)
    layer = model.layers[0].self_attn
    with torch.no_grad():
        for m in (layer.far.map_q, layer.far.map_k):
            m.bias.zero_()
        usual = layer.read(x, context)
        for m in (layer.far.map_q, layer.far.map_k):
            m.weight *= 0.05
        close(layer.read(x, context), usual)
        layer.far.map_q.bias.fill_(-9)
    o = layer.read(x, context)
    assert (o == 0).all()
    o.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_rows_start_where_they_say():
    """Untrained: the convolution and the shift pass x on, Llamba's gate is one, RADLADS' one half, gamma a tenth."""
    def layer(name):
        torch.manual_seed(0)
        return Decoder(SHAPE, VARIANTS[name], W if VARIANTS[name].window else None).double().layers[1].self_attn

    x, q, k, v = draw(1, T, E), draw(1, T, H, D), draw(1, T, H // R, D), draw(1, T, H // R, D)
    context = Decoder(SHAPE, VARIANTS["full"]).double().context(torch.zeros(1, T, dtype=torch.long))
    for name in ("mamba2", "mamba2_discrete", "gdn"):
        silu = F.silu if name != "mamba2_discrete" else lambda y: y
        for got, given in zip(layer(name).far.convolve(q, k, v, context, None), (q, k, v)):
            assert torch.equal(got, silu(given))
    for name in ("rwkv6", "rad_rwkv6", "rwkv7"):
        streams, _ = layer(name).far.shifted(x, context, None)
        assert len(streams) == (6 if name == "rwkv7" else 5) and all(torch.equal(y, x) for y in streams.values())
    discrete = layer("mamba2_discrete").far
    assert (F.silu(discrete.output_gate(x)) - 1).abs().max() < 1e-5 and (discrete.skip == 1).all()
    assert torch.equal(torch.sigmoid(layer("rad_rwkv6").far.output_gate(x)), torch.full((1, T, H * D), 0.5, dtype=torch.float64))
    assert (torch.sigmoid(layer("lolcats").gamma) - 0.1).abs().max() < 1e-6
    dt = F.softplus(layer("mamba2").far.dt(x))
    assert (dt > 0.9e-3).all() and (dt < 1.1e-1).all() and (layer("mamba2").far.log_A.exp() > 1).all()
    assert not [n for n, _ in layer("liger_gla").named_parameters() if reference.is_new(n)]
    forget = torch.sigmoid(layer("mlstm").far.forget_gate(x))
    close(forget, torch.sigmoid(torch.linspace(3, 6, H).double()).expand(1, T, H))


# ---------------------------------------------------------------- every far part, every mix


ADD = ("linear", "t2r", "hedgehog")  # far parts with a numerator and a positive denominator to share
COMBINATIONS = [(far, mix, per) for far in FARS for mix in WORDS["mix"] for per in WORDS["state_per"]]


def rows(far, mix, per):
    """The row: beside a window, or alone."""
    return combine("linear" if mix is None else "swa", far, mix, [f"state_per={per}"])


@pytest.mark.parametrize("far, mix, per", COMBINATIONS, ids=lambda x: str(x))
def test_every_combination(far, mix, per):
    """Refused in one line, or: pieces equal the whole, documents their own runs, fast ops the plain ones, a closed gate the
    window, and the bytes are the table's."""
    if mix in reference.SHARED and far not in ADD:
        refused(lambda: rows(far, mix, per), "swa+" + far, "mix=" + mix)
        return
    row, shape = rows(far, mix, per), dataclasses.replace(SHAPE, layers=1)
    model, tokens = decoder(row, shape, window=W), draw_tokens(2, T)
    with torch.no_grad():
        whole = model(tokens)
        logits, cache = read_pieces(model, tokens, 4)
        single, cache1 = read_pieces(model, tokens, 1)
        close(logits, whole)
        close(single, whole)
        same_cache(cache1, cache)
        segment = torch.tensor([[0] * 3 + [1] * 16, [0] * 11 + [1] * 8])
        packed = model(tokens, segment=segment)
        for b, cut in enumerate((3, 11)):
            close(packed[b:b + 1], torch.cat([model(tokens[b:b + 1, :cut]), model(tokens[b:b + 1, cut:])], 1))
        close(decoder(row, shape, window=W, ops=fast)(tokens), whole)
        if mix == "gate":
            gate = model.layers[0].self_attn.mix_gate
            gate["weight"].zero_()
            gate["bias"].fill_(-1e4)
            alone = decoder(VARIANTS["swa"], shape, window=W)
            alone.load_state_dict({n: p for n, p in model.state_dict().items() if not reference.is_new(n)})
            close(model(tokens), alone(tokens))
    held = layer_cache(shape, row, W if row.window else None, device="meta")
    assert cache_bytes(cache.layers[0]) == 2 * sum(
        t.nbytes * (4 if n in "kv" else 2) for n, t in held.items())  # float64 here: four times a bfloat16, twice a float32
    for strict in (False, True):
        line = memory_row(shape, dataclasses.replace(row, strict=strict), 60)
        assert (line["tokens_exact"] if strict else line["tokens_nominal"]) <= 60 and (line["window"] is None) == (mix is None)


@pytest.mark.parametrize("far", FARS)
def test_learned_sinks_and_kept_sinks_beside_any_state(far):
    """Both kinds of sink in one gated row, pieces equal the whole."""
    row = combine("swa_sink_tokens", far, "gate", ["learned_sink=true", "keep=2"])
    model, tokens = decoder(row, dataclasses.replace(SHAPE, layers=1), window=W), draw_tokens(2, T)
    with torch.no_grad():
        close(read_pieces(model, tokens, 4)[0], model(tokens))


def test_attention_is_the_class_of_every_row():
    """No row brings a class of its own."""
    assert all(type(decoder(row, window=W).layers[0].self_attn) is Attention for row in VARIANTS.values())
