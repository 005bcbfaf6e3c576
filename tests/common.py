"""What several test files share: the one place of tolerances, tiny pairwise distinct sizes, the rows under test."""

import dataclasses

import pytest
import torch

from bench import allowed, rms
from reference import VARIANTS, Decoder, Shape, UserError

def close(got, exact, same=None, times=2):
    """RMS(got - exact) is within bench.allowed; infinities and shapes are equal."""
    assert got.shape == exact.shape, (got.shape, exact.shape)
    finite = ~exact.isinf()
    assert torch.equal(got[~finite].double(), exact[~finite].double())
    x, exact, same = got.detach().double()[finite], exact.detach().double()[finite], same if same is None else same.detach()[finite]
    limit = allowed(got.dtype, exact, same, times)
    assert rms(x - exact) <= limit, f"RMS error {rms(x - exact):.3g} of {rms(exact):.3g}, allowed {limit:.3g}"


def refused(call, *names):
    """`call` raises a UserError of one line that holds each of `names`."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for name in names:
        assert name in message, message


W, B, T = 7, 3, 38
SHAPE = Shape("tiny", layers=2, width=20, heads=10, kv_heads=5, head_dim=8, ffn=28, vocab=41, rope_theta=100.0,
              max_position=200, norm_eps=1e-6, qk_norm=True, qkv_bias=True, output_bias=True, mlp_bias=True, tied=False)


def changed(name, label, **fields):
    """The row with fields of its own or of its far part changed."""
    row = VARIANTS[name]
    near = {field: value for field, value in fields.items() if field in row.__dataclass_fields__}
    far = {field: value for field, value in fields.items() if field not in near}
    return dataclasses.replace(row, name=f"{name}-{label}", **near, **({"far": dataclasses.replace(row.far, **far)} if far else {}))


ROWS = [*VARIANTS.values(),  # the registry, then what its rows leave out
        changed("swa_sink_tokens", "in-cache", sink_positions="in-cache"),
        changed("swa_sink_tokens", "learned", learned_sink=True),
        changed("bifocal", "softmax", features="softmax", normalizer="plain"),
        changed("bifocal", "in-cache", keep=4, sink_positions="in-cache"),
        changed("bifocal_state", "rotary", features="identity", map="none", rotary="before", scaled=True),
        changed("rwkv7", "raw", normed=False, state_per="kv"),
        changed("supra", "retnet", decay="retnet", state_per="kv", rotary="none", normalizer="plain", output_norm="none"),
        changed("lolcats", "sinks", keep=2, learned_sink=True, decay="alibi", state_per="kv", mix="shared_complement")]
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def decoder(row, shape=SHAPE, window=W, dtype=torch.float64, ops=None, seed=0):
    """A decoder whose parameters are all random, so that no gate is neutral and no norm is one."""
    torch.manual_seed(seed)
    model = Decoder(shape, row, window if row.window else None, ops).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def draw_tokens(*size, seed=1):
    return torch.randint(0, SHAPE.vocab, size, generator=torch.Generator().manual_seed(seed))


def read_pieces(model, tokens, piece, **kwargs):
    """Logits and the cache after reading tokens through a cache, `piece` at a time."""
    cache = model.cache(len(tokens), dtype=model.norm.weight.dtype, capacity=tokens.shape[1])
    with torch.no_grad():
        logits = [model(part, cache=cache, **kwargs) for part in tokens.split(piece, 1)]
    return torch.cat(logits, 1), cache


def same_cache(got, exact):
    """Every tensor of every layer, and the counts."""
    assert torch.equal(got.seen, exact.seen)
    for a, b in zip(got.layers, exact.layers, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            close(a[name], b[name])


def row_of(cache, b):
    """The cache of row b alone."""
    return dataclasses.replace(cache, layers=[{n: t[b:b + 1] for n, t in layer.items()} for layer in cache.layers],
                               seen=cache.seen[b:b + 1])
