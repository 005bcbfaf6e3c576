"""reference.py: attention under a fixed memory, to be read top to bottom.

The one idea. An attention layer that may not grow makes three choices:
    near  which past tokens it keeps exactly: a window of the last W, the first N as sinks,
          perhaps a learned sink logit;
    far   which summary it keeps of everything else: a recurrent state with decay, write rule
          and feature map;
    mix   how the two answers become one: none (only one of them), a per-head gate, ...
A variant is a row of the table VARIANTS; one layer (`Attention`) executes any row.

    python reference.py                             # memory table of Qwen3-4B at 576 tokens a layer
    python reference.py --shape mini --budget 72    # the miniature, one eighth of it

Glossary. One symbol, one meaning, in the whole project.
    B batch   T query positions   S key positions   E model width   V vocabulary   L layers
    H query heads   Hk key/value heads   R = H/Hk query heads per key/value head; query head = h*R + r
    Hs state heads (Hk or H)   D head dim   C the matrix state (D x D, key x value), C_t below
    W window: the number of keys a query sees, itself included: s in [t-W+1, t]
    N kept sink tokens: s < N, in addition to the window (`keep` in code)
    q, k, v: (B, T, heads, D)   i, f: gate pre-activations (B, T, Hs)   g: the mixing gate (B, T, H)
    n the normaliser (D)   m the stabiliser (a scalar)   phi a feature map

To add a variant: add a row to ROWS. The command line, the tables and the tests iterate over it.

Precision. Ops compute in the dtype they are given; states are float32 (float64 for float64 inputs).
This file in float64 is the truth that fast.py is tested against.

References.
    [X]  xLSTM, arXiv 2405.04517; its kernels, arXiv 2503.14376
    [P]  Effective Distillation to Hybrid xLSTM Architectures, arXiv 2603.15590
    [B]  "Sliding window beats linear attention, but only on short answers", Hugging Face article, 2026-11-02
    [S]  Sliding-window beats linear attention, arXiv 2608.28444
    StreamingLLM, arXiv 2309.17453 (sink tokens); gpt-oss, its public torch model (learned sinks)

Not here: speed (fast.py), data (tasks.py), training (train.py), scores (eval.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UserError(Exception):
    """A user's mistake: one line that names the thing and the mend."""


# ----------------------------------------------------------------------------- shapes and presets


@dataclass(frozen=True)
class Shape:
    """A decoder's shape. Every field is stored, none derived: E/H is not D (Qwen3-4B: 80 and 128)."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float
    max_position: int
    norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool


QWEN3_4B = Shape("qwen3-4b", layers=36, width=2560, heads=32, kv_heads=8, head_dim=128, ffn=9728, vocab=151936,
                 rope_theta=5e6, max_position=262144, norm_eps=1e-6, qk_norm=True,
                 qkv_bias=False, output_bias=False, mlp_bias=False, tied=True)
SMOLLM2_135M = Shape("smollm2", layers=30, width=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49152,
                     rope_theta=1e5, max_position=8192, norm_eps=1e-5, qk_norm=False,
                     qkv_bias=False, output_bias=False, mlp_bias=False, tied=True)
MINI = Shape("mini", layers=3, width=128, heads=8, kv_heads=2, head_dim=16, ffn=256, vocab=352,
             rope_theta=1e4, max_position=1024, norm_eps=1e-6, qk_norm=True,
             qkv_bias=False, output_bias=False, mlp_bias=False, tied=True)
PRESETS = {s.name: s for s in (QWEN3_4B, MINI, SMOLLM2_135M)}
BUDGET = {"mini": 72}  # tokens a layer; every other shape: 576, as in [B]


# ----------------------------------------------------------------------------- parts


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; half precision is normalised in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x if x.dtype == torch.float64 else x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def rotary_table(position: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each (B, T, 1, D/2), of the angles position * theta^(-2j/D)."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=position.device, dtype=exact) / head_dim)
    angle = (position[..., None].to(exact) * frequency)[..., None, :]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of x (B, T, heads, D): the pair (x_j, x_{j+D/2}) turns by the table's angle j."""
    cos, sin = table
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


# ----------------------------------------------------------------------------- ops: near


def document_positions(segment: Tensor) -> Tensor:
    """Position of every token inside its own document, (B, T), from segment numbers (B, T)."""
    index = torch.arange(segment.shape[1], device=segment.device).expand_as(segment)
    return index - torch.where(_starts(segment), index, 0).cummax(dim=1).values


def _starts(segment: Tensor) -> Tensor:
    """(B, T) bool: True where a document begins. The first token continues whatever state it is given."""
    return F.pad(segment[:, 1:] != segment[:, :-1], (1, 0))


def visible(q_position: Tensor, k_position: Tensor, *, window: int | None = None, keep: int = 0) -> Tensor:
    """Which keys a query sees, (B, T, S) bool; a key position of -1 is an empty slot.

        0 <= s <= t  and  (s > t - W  or  s < N)                                            (1)
    """
    t, s = q_position[:, :, None], k_position[:, None, :]
    mask = (s >= 0) & (s <= t)
    if window is not None:
        mask &= (s > t - window) | (s < keep)
    return mask


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor | None = None, *,
                  q_keep: Tensor | None = None, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax attention over the keys that `mask` (B, T, S) shows.

    q (B, T, H, D); k, v (B, S, Hk, D); sink (H) or None. Returns o (B, T, H, D) and lse (B, T, H),
    the log-sum-exp of the visible scores, without the sink. A row that sees nothing gives o = 0, lse = -inf.

        a_ts = q_t . k_s / sqrt(D)          lse_t = log sum_s exp(a_ts)                     (2)
        o_t  = sum_s exp(a_ts - lse_t) v_s * sigmoid(lse_t - sink)                          (3)

    (3) is softmax over the scores and one more logit, `sink`, whose column is then dropped (gpt-oss):
    exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink). The sink is not scaled by 1/sqrt(D).
    Where `kept` (B, S) is set the score uses q_keep in place of q: StreamingLLM's in-cache positions.
    """
    B, T, H, D = q.shape
    Hk = k.shape[2]

    def scores(q):
        return torch.einsum("bthrd,bshd->bhrts", q.reshape(B, T, Hk, H // Hk, D), k) * D**-0.5

    a = scores(q)                                                                # (B, Hk, R, T, S)
    if q_keep is not None:
        a = torch.where(kept[:, None, None, None, :], scores(q_keep), a)
    a = a.masked_fill(~mask[:, None, None], -math.inf)                           # (2)
    lse = a.logsumexp(dim=-1)                                                    # (B, Hk, R, T)
    p = (a - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    o = torch.einsum("bhrts,bshd->bthrd", p, v).reshape(B, T, H, v.shape[-1])
    lse = lse.permute(0, 3, 1, 2).reshape(B, T, H)
    if sink is not None:
        share = torch.sigmoid(lse - sink).masked_fill(lse == -math.inf, 0)       # (3)
        o = o * share[..., None]
    return o, lse


def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, *, window: int | None = None, keep: int = 0,
           segment: Tensor | None = None, q_keep: Tensor | None = None, return_lse: bool = False):
    """Causal attention of a whole sequence with a window and sinks: (1), (2), (3).

    q (B, T, H, D); k, v (B, T, Hk, D); sink (H): one learned logit per query head; window: W or None for all;
    keep: N; segment (B, T): a new document begins where it changes, and documents do not see each other; q_keep:
    see `attend_masked`. Returns o (B, T, H, D), or (o, lse (B, T, H)) with return_lse.
    Sources: FlashAttention's window (W-1, 0); StreamingLLM; gpt-oss.
    """
    B, T = q.shape[:2]
    if segment is None:
        position = torch.arange(T, device=q.device).expand(B, T)
        mask = visible(position, position, window=window, keep=keep)
    else:
        position, document = document_positions(segment), _starts(segment).cumsum(1)
        index = torch.arange(T, device=q.device)
        mask = visible(position, position, window=window, keep=keep) & (index[:, None] >= index)
        mask &= document[:, :, None] == document[:, None, :]
    o, lse = attend_masked(q, k, v, mask, sink, q_keep=q_keep, kept=position < keep)
    return (o, lse) if return_lse else o


# ----------------------------------------------------------------------------- ops: far


def mlstm_state(B: int, Hs: int, D: int, *, m0: float = 0.0, dtype=torch.float32, device=None) -> tuple[Tensor, ...]:
    """The empty state of `mlstm`: C (B, Hs, D, D), n (B, Hs, D), m (B, Hs) = m0."""
    new = dict(dtype=dtype, device=device)
    return torch.zeros(B, Hs, D, D, **new), torch.zeros(B, Hs, D, **new), torch.full((B, Hs), m0, **new)


def mlstm(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, *, state: tuple[Tensor, ...] | None = None,
          segment: Tensor | None = None, normalizer: str = "floor", scale: float | None = None, m0: float = 0.0):
    """The stabilised mLSTM recurrence of [X], one state per head of k.

    q (B, T, H, D); k, v (B, T, Hs, D); i, f (B, T, Hs) pre-activations; Hs divides H and query head h*R + r
    reads state h. Returns o (B, T, H, D) and the state (C (B, Hs, D, D), n (B, Hs, D), m (B, Hs)).

        m_t = max(logsigmoid(f_t) + m_{t-1}, i_t)                                           (4)
        f'  = exp(logsigmoid(f_t) + m_{t-1} - m_t),   i' = exp(i_t - m_t)                   (5)
        C_t = f' C_{t-1} + i' k_t v_t^T,              n_t = f' n_{t-1} + i' k_t             (6)
        o_t = C_t^T q_t / max(|n_t . q_t|, exp(-m_t)),   q scaled by `scale`, 1/sqrt(D)     (7)

    normalizer "floor" is (7); "plain" divides by n_t . q_t + tiny instead, as [P] does with positive features.
    The sigmoid input gate of [X] is i = logsigmoid(i~): the floor exp(-m) is 1 in unscaled terms, see NOTES.md.
    m0: the empty state's stabiliser, 0 (NX-AI's kernels) or -inf; the outputs are the same up to rounding.
    segment (B, T): the state is emptied where it changes. A padded step is i = -inf, f = +inf: it neither
    decays nor writes. Raises ValueError on another normalizer.
    """
    if normalizer not in ("floor", "plain"):
        raise ValueError(f"normalizer {normalizer!r}: 'floor' or 'plain'")
    B, T, H, D = q.shape
    Hs = k.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    q = (q.to(dtype) * (D**-0.5 if scale is None else scale)).reshape(B, T, Hs, H // Hs, D)
    k, v, i, log_f = k.to(dtype), v.to(dtype), i.to(dtype), F.logsigmoid(f.to(dtype))
    empty = mlstm_state(B, Hs, D, m0=m0, dtype=dtype, device=q.device)
    C, n, m = empty if state is None else state
    starts = None if segment is None else _starts(segment)
    out = []
    for t in range(T):
        if starts is not None:
            s = starts[:, t, None]
            C, n, m = (torch.where(s.reshape(B, *[1] * (x.ndim - 1)), x0, x) for x0, x in zip(empty, (C, n, m)))
        decayed = log_f[:, t] + m
        m = torch.maximum(decayed, i[:, t])                                                # (4)
        shift = m.masked_fill(m == -math.inf, 0)  # nothing written yet: exp(-inf - 0) = 0
        f_, i_ = (decayed - shift).exp(), (i[:, t] - shift).exp()                          # (5)
        C = f_[..., None, None] * C + i_[..., None, None] * k[:, t, :, :, None] * v[:, t, :, None, :]  # (6)
        n = f_[..., None] * n + i_[..., None] * k[:, t]
        num = torch.einsum("bhrd,bhde->bhre", q[:, t], C)
        den = torch.einsum("bhrd,bhd->bhr", q[:, t], n)
        den = mlstm_denominator(den, m[..., None], normalizer)
        out.append(num / den[..., None])                                                   # (7)
    o = torch.stack(out, 1).reshape(B, T, H, v.shape[-1]) if out else q.new_zeros(B, 0, H, v.shape[-1])
    return o, (C, n, m)


def mlstm_denominator(den: Tensor, m: Tensor, normalizer: str) -> Tensor:
    """The denominator of (7) from n . q and m."""
    if normalizer == "floor":
        return torch.maximum(den.abs(), (-m).exp())
    return den + torch.finfo(den.dtype).tiny


# ----------------------------------------------------------------------------- variants: the registry


@dataclass(frozen=True)
class Variant:
    """One row: what a layer keeps exactly, what it summarises, how it mixes them.

    near    window: True = a window that spends what is left of the budget; False = no softmax branch;
            None = keep everything. keep: N. learned_sink: one logit per query head.
            sink_positions: 'original' (what training with a mask gives) or 'in-cache' (StreamingLLM).
    far     far: the recurrence or None. state_per: 'kv' or 'query', one state per such head.
            features: 'l2' (phi(x) = l2norm(W x)), 'softmax' ([P]: softmax(W x)), 'identity'; W one D x D map per
            head, identity at the start. normalizer: see `mlstm`. far_rotary: rotate q and k before phi.
            q and k enter after the q/k norm; i and f are linear in the layer's input x, as in [P].
    mix     None, or 'gate': o = g far + (1-g) near, g = sigmoid([q; k; v] w + b) per query head ([P]),
            w = 0 and b = gate_bias at the start.
    strict  the window fits the budget with every byte counted, not the matrix states alone.
    """

    name: str
    note: str
    window: bool | None = True
    keep: int = 0
    learned_sink: bool = False
    sink_positions: str = "original"
    far: str | None = None
    state_per: str = "kv"
    features: str = "l2"
    normalizer: str = "floor"
    far_rotary: bool = False
    mix: str | None = None
    strict: bool = False


ROWS = [
    Variant("full", "every key: the teacher", window=None),
    Variant("swa", "a sliding window alone"),
    Variant("swa_sink_tokens", "a window and the first 4 tokens", keep=4),
    Variant("swa_learned_sink", "a window and a learned sink logit", learned_sink=True),
    Variant("mlstm", "a state per query head, no window", window=False, far="mlstm", state_per="query"),
    Variant("bifocal", "a large window and a state per kv head, gated", learned_sink=True,
            far="mlstm", state_per="kv", mix="gate"),
    Variant("bifocal_state", "a small window and a state per query head, gated", learned_sink=True,
            far="mlstm", state_per="query", mix="gate"),
]
# Where a window shares its budget with a state, the two ways to count differ: a strict twin each.
VARIANTS = {row.name: row for row in ROWS}
VARIANTS |= {f"{row.name}_strict": dataclasses.replace(row, name=f"{row.name}_strict", strict=True)
             for row in ROWS if row.window and row.far}


def find_variant(name: str) -> Variant:
    """The row of that name. Raises UserError with the names there are."""
    if name not in VARIANTS:
        raise UserError(f"variant {name!r} is not one of: {' '.join(VARIANTS)}")
    return VARIANTS[name]


def parse_row(name: str, settings: list[str]) -> Variant:
    """The row of that name with fields changed by "field=value" settings. Raises UserError for what it cannot read."""
    row = find_variant(name)
    for setting in settings:
        field, _, value = setting.partition("=")
        if field not in {f.name for f in dataclasses.fields(Variant)} - {"name", "note"}:
            raise UserError(f"--row {setting}: write FIELD=VALUE with a field of reference.Variant, such as features=softmax")
        kind = type(getattr(Variant("", ""), field))
        try:
            value = {"none": None, "true": True, "false": False}.get(value.lower(), int(value) if kind is int else value)
        except ValueError:
            raise UserError(f"--row {setting}: {field} is a whole number") from None
        if kind is bool and not isinstance(value, bool) and (field, value) != ("window", None):
            raise UserError(f"--row {setting}: {field} is true or false" + (" or none" if field == "window" else ""))
        row = dataclasses.replace(row, **{field: value})
    check_variant(row)
    return row


def check_variant(row: Variant) -> None:
    """Raises UserError for a field whose value the layer does not know, or a row that makes no sense."""
    for field, known in (("sink_positions", ("original", "in-cache")), ("far", (None, "mlstm")),
                         ("state_per", ("kv", "query")), ("features", ("l2", "softmax", "identity")),
                         ("normalizer", ("floor", "plain")), ("mix", (None, "gate"))):
        if getattr(row, field) not in known:
            raise UserError(f"variant {row.name}: {field} {getattr(row, field)!r} is not one of {known}")
    if (row.mix is None) == (row.far is not None and row.window is not False):
        raise UserError(f"variant {row.name}: mix {row.mix!r} needs {'one branch' if row.mix is None else 'two branches'}")
    if row.window is False and row.far is None:
        raise UserError(f"variant {row.name}: keeps nothing: it needs a window or a state")
    if row.far and row.normalizer == "plain" and row.features != "softmax":
        raise UserError(f"variant {row.name}: normalizer 'plain' needs positive features: features=softmax")
    if row.keep and row.window is None:
        raise UserError(f"variant {row.name}: it keeps every token, so keep={row.keep} adds nothing: leave it out")
    if row.keep < 0 or (row.window is False and (row.keep or row.learned_sink)):
        raise UserError(f"variant {row.name}: sinks need a window, and keep >= 0")


# ----------------------------------------------------------------------------- memory accounting


def layer_cache(shape: Shape, row: Variant, window: int | None, batch: int = 1, *, dtype=torch.bfloat16,
                device=None) -> dict[str, Tensor]:
    """All that one layer holds while decoding `batch` sequences, preallocated.

    k, v (B, N+W, Hk, D) in `dtype`: slot s < N holds sink s, slot N + (p-N) mod W holds position p (a ring).
    C, n, m: the float32 recurrent state (float64 if dtype is). Raises UserError if window is None: `full` needs
    its capacity in tokens.
    """
    cache = {}
    if row.window is not False:
        if window is None:
            raise UserError(f"variant {row.name} keeps every token: give the number of tokens to make room for")
        for name in "kv":
            cache[name] = torch.zeros(batch, row.keep + window, shape.kv_heads, shape.head_dim, dtype=dtype, device=device)
    if row.far:
        heads = shape.kv_heads if row.state_per == "kv" else shape.heads
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        cache |= zip("Cnm", mlstm_state(batch, heads, shape.head_dim, dtype=state_dtype, device=device))
    return cache


def cache_bytes(cache: dict[str, Tensor], names=None) -> int:
    """Bytes of the tensors of one layer's cache (of those named, if names is given)."""
    return sum(t.numel() * t.element_size() for n, t in cache.items() if names is None or n in names)


def token_bytes(shape: Shape) -> int:
    """Bytes of one cached token in one layer: k and v in bfloat16, 2 * Hk * D * 2."""
    return 2 * shape.kv_heads * shape.head_dim * 2


def solve_window(shape: Shape, row: Variant, budget: int) -> int | None:
    """The window W that spends `budget` (tokens a layer), or None for a row without one.

        nominal: W + N + bytes(C) / token <= budget        strict: W + N + bytes(C, n, m) / token <= budget

    Raises UserError if the budget cannot hold the state, the sinks and one token of window.
    """
    if row.window is None:
        return None
    fixed = layer_cache(shape, row, 0, device="meta")
    state = cache_bytes(fixed, "kv" if row.far is None else "kvCnm" if row.strict else "kvC")
    window = (budget * token_bytes(shape) - state) // token_bytes(shape)
    least = -(-state // token_bytes(shape)) + (1 if row.window else 0)
    if window < (1 if row.window else 0):
        raise UserError(f"--budget {budget} is too small for {row.name} on {shape.name}: it needs at least {least} tokens")
    return window if row.window else None


def new_parameters(shape: Shape, row: Variant) -> int:
    """Parameters that the variant adds to the whole model: sinks, maps, gates."""
    with torch.device("meta"):
        return shape.layers * sum(p.numel() for n, p in Attention(shape, row, 1).named_parameters() if is_new(n))


def memory_row(shape: Shape, row: Variant, budget: int | None, window: int | None = None) -> dict:
    """One line of the memory table, bytes summed over meta tensors of the shapes that decoding allocates.

    The window is the one given, else the one that spends the budget. The sizes are None for `full`, which has no bound,
    and where neither is given.
    """
    out = {"name": row.name, "window": None, "keep": row.keep, "state": row.state_per if row.far else None,
           "bytes_per_layer": None, "tokens_nominal": None, "tokens_exact": None, "parameters": new_parameters(shape, row)}
    if row.window is not None and (budget, window) != (None, None):
        out["window"] = solve_window(shape, row, budget) if budget is not None else window
        cache = layer_cache(shape, row, out["window"], device="meta")
        out |= {"bytes_per_layer": cache_bytes(cache), "tokens_nominal": cache_bytes(cache, "kvC") / token_bytes(shape),
                "tokens_exact": cache_bytes(cache) / token_bytes(shape)}
    return out


# ----------------------------------------------------------------------------- the model


NEW = ("sink", "feature_q", "feature_k", "input_gate", "forget_gate", "mix_gate")


def is_new(name: str) -> bool:
    """Whether a parameter of that name is the variant's own (stage I trains these alone) or the teacher's."""
    return any(part in NEW for part in name.split("."))


class HeadLinear(nn.Module):
    """One D_in -> D_out map per head: x (B, T, heads, D_in) -> (B, T, heads, D_out). No bias, identity at the start."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(head_dim).repeat(heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bthd,hde->bthe", x, self.weight)


def feature_map(x: Tensor, kind: str) -> Tensor:
    """phi over the last axis: 'softmax', 'l2' (unit length) or 'identity'."""
    if kind == "softmax":
        return x.softmax(-1)
    return F.normalize(x, dim=-1, eps=1e-6) if kind == "l2" else x


@dataclass
class Context:
    """What all layers of one forward pass share: where the tokens stand and what they see."""

    rotary: tuple[Tensor, Tensor]  # at the tokens' positions
    rotary_keep: tuple[Tensor, Tensor] | None  # at min(t, N+W-1): the query's in-cache position
    segment: Tensor | None = None  # (B, T)
    position: Tensor | None = None  # (B, T), -1 at padded steps; this and what follows only with a cache
    mask: Tensor | None = None  # (B, T, N+W (+T if T > 1))
    kept: Tensor | None = None  # the mask's key axis: is it a sink?
    write: tuple[Tensor, Tensor, Tensor] | None = None  # (row, slot, step) of every token that enters the ring


class Attention(nn.Module):
    """The one layer that executes any row of the table. `window` is W, solved from the budget."""

    def __init__(self, shape: Shape, row: Variant, window: int | None, ops=None):
        super().__init__()
        check_variant(row)
        E, H, Hk, D = shape.width, shape.heads, shape.kv_heads, shape.head_dim
        self.shape, self.row, self.window, self.ops = shape, row, window, ops or sys.modules[__name__]
        self.q_proj = nn.Linear(E, H * D, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(E, Hk * D, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(E, Hk * D, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(H * D, E, bias=shape.output_bias)
        if shape.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(D, shape.norm_eps), RMSNorm(D, shape.norm_eps)
        if row.learned_sink:
            self.sink = nn.Parameter(torch.zeros(H))
        if row.far:
            Hs = Hk if row.state_per == "kv" else H
            if row.features != "identity":
                self.feature_q, self.feature_k = HeadLinear(H, D), HeadLinear(Hs, D)
            self.input_gate, self.forget_gate = nn.Linear(E, Hs), nn.Linear(E, Hs)
            for gate in (self.input_gate, self.forget_gate):
                nn.init.zeros_(gate.weight)
            nn.init.zeros_(self.input_gate.bias)
            self.forget_gate.bias.data.copy_(torch.linspace(3, 6, Hs))
        if row.mix == "gate":
            self.mix_gate = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(H, 3 * D)),
                                              "bias": nn.Parameter(torch.zeros(H))})

    def read(self, x: Tensor, context: Context, cache: dict[str, Tensor] | None = None) -> Tensor:
        """The layer's answer before W_o, (B, T, H, D), for x (B, T, E), the normalised block input.

        It is what stage I of the distillation matches; the block applies o_proj.
        """
        row, (q, k, v) = self.row, self.qkv(x)
        near = self.near(q, k, v, context, cache) if row.window is not False else None
        far = self.far(x, q, k, v, context, cache) if row.far else None
        if row.mix is None:
            return near if far is None else far
        g = self.gate(q, k, v)[..., None]
        return g * far + (1 - g) * near

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, T, H, D), k and v (B, T, Hk, D) of x (B, T, E): after the q/k norm, before rotary."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.shape.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return (self.q_norm(q), self.k_norm(k), v) if self.shape.qk_norm else (q, k, v)

    def near(self, q, k, v, context, cache):
        """The window and the sinks. With a cache, keys and values are rounded to its dtype before any use, so
        that pieces of any size give the same answer."""
        row, sink = self.row, self.sink if self.row.learned_sink else None
        q_keep = rotate(q, context.rotary_keep) if context.rotary_keep else None
        q, k = rotate(q, context.rotary), rotate(k, context.rotary)
        if cache is None:
            return self.ops.attend(q, k, v, sink, window=self.window, keep=row.keep, segment=context.segment, q_keep=q_keep)
        k, v = k.to(cache["k"].dtype), v.to(cache["v"].dtype)
        rows, slots, steps = context.write
        if q.shape[1] == 1:  # one token: write it, then read the ring as it is
            cache["k"][rows, slots], cache["v"][rows, slots] = k[rows, steps], v[rows, steps]
            keys, values = cache["k"], cache["v"]
        else:  # a piece: early queries still need keys that late ones evict
            keys, values = torch.cat([cache["k"], k], 1), torch.cat([cache["v"], v], 1)
            cache["k"][rows, slots], cache["v"][rows, slots] = k[rows, steps], v[rows, steps]
        return attend_masked(q, keys.to(q.dtype), values.to(q.dtype), context.mask, sink, q_keep=q_keep, kept=context.kept)[0]

    def far(self, x, q, k, v, context, cache):
        """The recurrent state: gates from x, features from q and k, then the recurrence."""
        row = self.row
        if row.far_rotary:
            q, k = rotate(q, context.rotary), rotate(k, context.rotary)
        if row.state_per == "query":
            k, v = (t.repeat_interleave(self.shape.heads // self.shape.kv_heads, dim=2) for t in (k, v))
        if row.features != "identity":
            q, k = self.feature_q(q), self.feature_k(k)
        q, k = feature_map(q, row.features), feature_map(k, row.features)
        i = 15 * torch.tanh(self.input_gate(x) / 15)  # soft-capped, so that exp(i) stays in range
        f = self.forget_gate(x)
        if context.position is not None:  # a padded step neither decays nor writes
            padded = (context.position < 0)[..., None]
            i, f = i.masked_fill(padded, -math.inf), f.masked_fill(padded, math.inf)
        state = None if cache is None else (cache["C"], cache["n"], cache["m"])
        o, state = self.ops.mlstm(q, k, v, i, f, state=state, segment=context.segment, normalizer=row.normalizer,
                                  scale=1.0 if row.features == "l2" else None)
        if cache is not None:
            for name, value in zip("Cnm", state):
                cache[name].copy_(value)
        return o.to(x.dtype)

    def gate(self, q, k, v) -> Tensor:
        """g (B, T, H): how much of the answer is the state's."""
        R = self.shape.heads // self.shape.kv_heads
        w_q, w_k, w_v = self.mix_gate["weight"].chunk(3, dim=-1)

        def per_query_head(x, w):  # x (B, T, Hk, D) . w (H, D) -> (B, T, H)
            return torch.einsum("bthd,hrd->bthr", x, w.unflatten(0, (-1, R))).flatten(2)

        return torch.sigmoid(torch.einsum("bthd,hd->bth", q, w_q) + per_query_head(k, w_k) + per_query_head(v, w_v)
                             + self.mix_gate["bias"])


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.ffn, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.width, shape.ffn, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.ffn, shape.width, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm decoder layer of the Qwen3 and Llama families."""

    def __init__(self, shape: Shape, row: Variant, window: int | None, ops=None):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape, row, window, ops)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.mlp = MLP(shape)

    def read(self, x: Tensor, context: Context) -> Tensor:
        """The attention's answer before W_o for a block input x (B, T, E): (B, T, H, D)."""
        return self.self_attn.read(self.input_layernorm(x), context)

    def finish(self, x: Tensor, o: Tensor) -> Tensor:
        """The rest of the block, from its input x and the attention's answer o before W_o."""
        x = x + self.self_attn.o_proj(o.flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor, context: Context, cache: dict[str, Tensor] | None = None) -> Tensor:
        return self.finish(x, self.self_attn.read(self.input_layernorm(x), context, cache))


@dataclass
class Cache:
    """A decoding state: the layers' tensors and how many tokens each row has seen, (B)."""

    layers: list[dict[str, Tensor]]
    seen: Tensor

    def bytes_per_layer(self) -> int:
        """Bytes of one layer's tensors for one sequence of the batch."""
        return cache_bytes(self.layers[0]) // len(self.seen)


class Decoder(nn.Module):
    """A decoder whose every attention layer is one row of the table.

    Parameter names are Hugging Face's without the leading `model.`, so that loading needs no table of names.
    ops: this module, or fast. Weights are N(0, 0.02) until something is loaded.
    Three faces that agree: whole sequence (no cache), pieces, one token (with a cache from `cache()`).
    """

    def __init__(self, shape: Shape, row: Variant, window: int | None = None, ops=None):
        super().__init__()
        if row.window and (window is None or window < 1):
            raise UserError(f"variant {row.name} needs a window of at least 1 token, not {window}")
        self.shape, self.row, self.window = shape, row, window
        self.embed_tokens = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Block(shape, row, window, ops) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        if not shape.tied:
            self.lm_head = nn.Linear(shape.width, shape.vocab, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2 and not is_new(name):
                nn.init.normal_(p, std=0.02)

    def cache(self, batch: int, *, dtype=torch.bfloat16, capacity: int | None = None) -> Cache:
        """An empty decoding state. capacity: tokens to make room for, used by `full` alone."""
        device = self.embed_tokens.weight.device
        window = capacity if self.row.window is None else self.window
        layers = [layer_cache(self.shape, self.row, window, batch, dtype=dtype, device=device) for _ in self.layers]
        return Cache(layers, torch.zeros(batch, dtype=torch.long, device=device))

    def context(self, tokens: Tensor, segment: Tensor | None = None, cache: Cache | None = None,
                length: Tensor | None = None) -> Context:
        """Positions, rotary tables and, with a cache, masks and ring slots: computed once for all layers."""
        B, T = tokens.shape
        step = torch.arange(T, device=tokens.device).expand(B, T)
        if cache is not None:
            step = step + cache.seen[:, None]
        elif segment is not None:
            step = document_positions(segment)
        dtype, D, theta = self.embed_tokens.weight.dtype, self.shape.head_dim, self.shape.rope_theta
        context = Context(rotary_table(step, D, theta, dtype), None, segment)
        N, W = self.row.keep, self.window
        if self.row.sink_positions == "in-cache" and N:
            context.rotary_keep = rotary_table(step.clamp(max=N + W - 1), D, theta, dtype)
        if cache is None:
            return context
        length = torch.full_like(cache.seen, T) if length is None else length
        context.position = torch.where(step < (cache.seen + length)[:, None], step, -1)
        if self.row.window is False:
            return context
        slots = cache.layers[0]["k"].shape[1] - N
        if self.row.window is None and int((cache.seen + length).max()) > slots:
            raise UserError(f"the cache of {self.row.name} has room for {slots} tokens, not for {int((cache.seen + length).max())}")
        enters = (context.position >= 0) & ((step < N) | (step >= (cache.seen + length)[:, None] - slots))
        rows, steps = enters.nonzero(as_tuple=True)
        p = step[rows, steps]
        context.write = rows, torch.where(p < N, p, N + (p - N) % slots), steps
        if T == 1:
            k_position = slot_positions(cache.seen + length, N, slots)
        else:
            k_position = torch.cat([slot_positions(cache.seen, N, slots), context.position], 1)
        context.mask = visible(step, k_position, window=W, keep=N)
        context.kept = k_position < N
        return context

    def hidden(self, tokens: Tensor, *, segment: Tensor | None = None, cache: Cache | None = None,
               length: Tensor | None = None) -> Tensor:
        """tokens (B, T) -> the final normalised hidden states (B, T, E).

        segment (B, T): packed documents. cache: continues from it and updates it in place; then `length` (B) says
        how many of the T tokens of each row are real, the rest being padding on the right. Use torch.no_grad()
        with a cache. Raises UserError if both segment and cache are given.
        """
        if cache is not None and segment is not None:
            raise UserError("a decoding cache holds one document a row: give segment or cache, not both")
        context = self.context(tokens, segment, cache, length)
        x = self.embed_tokens(tokens)
        for l, block in enumerate(self.layers):
            x = block(x, context, None if cache is None else cache.layers[l])
        if cache is not None:
            cache.seen += tokens.shape[1] if length is None else length
        return self.norm(x)

    def head(self, x: Tensor) -> Tensor:
        """hidden (..., E) -> logits (..., V)."""
        return F.linear(x, self.embed_tokens.weight) if self.shape.tied else self.lm_head(x)

    def forward(self, tokens: Tensor, **kwargs) -> Tensor:
        """tokens (B, T) -> logits (B, T, V); the keyword arguments of `hidden`."""
        return self.head(self.hidden(tokens, **kwargs))


def slot_positions(seen: Tensor, keep: int, slots: int) -> Tensor:
    """Position that each slot of the cache holds after `seen` (B) tokens, (B, N + slots); -1 where empty.

    Sink slot s holds s. Ring slot j holds the newest p < seen with p >= N and (p - N) mod slots = j.
    """
    sinks = torch.arange(keep, device=seen.device).expand(len(seen), -1)
    sinks = torch.where(sinks < seen[:, None], sinks, -1)
    last = seen[:, None] - 1
    ring = last - (last - keep - torch.arange(slots, device=seen.device)) % slots
    return torch.cat([sinks, torch.where(ring >= keep, ring, -1)], 1)


def build(shape: Shape, variant: str | Variant, budget: int | None = None, window: int | None = None, ops=None) -> Decoder:
    """A decoder of that shape with that variant; the window solves the budget (tokens a layer) unless given."""
    row = find_variant(variant) if isinstance(variant, str) else variant
    if window is not None and not row.window:
        raise UserError(f"--window {window}: variant {row.name} has no window to set")
    if window is None:
        window = solve_window(shape, row, BUDGET.get(shape.name, 576) if budget is None else budget)
    return Decoder(shape, row, window, ops)


# ----------------------------------------------------------------------------- generation


@torch.no_grad()
def generate(model: Decoder, prompts: list[list[int]], max_new: int, *, stop: tuple[int, ...] = (), temperature: float = 0.0,
             top_p: float = 1.0, seed: int = 0, vocab: int | None = None, cache_dtype=torch.bfloat16,
             piece: int = 512) -> tuple[list[list[int]], Cache]:
    """Continue each prompt by at most max_new tokens, through the real ring and state.

    prompts: lists of ids of any lengths >= 1. stop: ids that end a row (kept in its answer). temperature 0 is
    greedy; else nucleus sampling with top_p, each row by its own stream (seed + its index), so that a row does not
    depend on its batch. vocab: ids >= vocab are never chosen (padding of the logits). piece: prompts are read in
    pieces of that many tokens. Returns the new ids of each row and the final cache.
    Raises UserError for an empty prompt or sampling numbers out of range.
    """
    if not prompts or any(len(p) == 0 for p in prompts):
        raise UserError("a prompt is empty: generation needs at least one token to continue")
    if temperature < 0 or not 0 < top_p <= 1:
        raise UserError(f"temperature {temperature} must be >= 0 and top_p {top_p} in (0, 1]")
    device, B = model.embed_tokens.weight.device, len(prompts)
    total = torch.tensor([len(p) for p in prompts], device=device)
    longest = int(total.max())
    tokens = torch.zeros(B, longest, dtype=torch.long, device=device)
    for b, p in enumerate(prompts):
        tokens[b, : len(p)] = torch.tensor(p, device=device)
    cache = model.cache(B, dtype=cache_dtype, capacity=longest + max_new)
    last = torch.zeros(B, model.shape.width, device=device, dtype=model.embed_tokens.weight.dtype)
    for start in range(0, longest, piece):
        part = tokens[:, start : start + piece]
        length = (total - start).clamp(0, part.shape[1])
        x = model.hidden(part, cache=cache, length=length)
        ends = (total > start) & (total <= start + part.shape[1])
        last[ends] = x[ends, length[ends] - 1]
    noise = torch.stack([torch.rand(max_new, generator=torch.Generator().manual_seed(seed + b)) for b in range(B)])
    stops = torch.tensor(stop, dtype=torch.long, device=device)
    alive, out = torch.ones(B, dtype=torch.bool, device=device), []
    for t in range(max_new):
        logits = model.head(last)[:, :vocab]
        new = logits.argmax(-1) if temperature == 0 else sample(logits / temperature, top_p, noise[:, t].to(device))
        out.append(torch.where(alive, new, -1))
        alive = alive & ~torch.isin(new, stops)
        if t + 1 == max_new or not alive.any():
            break
        last = model.hidden(new[:, None], cache=cache, length=alive.long())[:, 0]
    ids = torch.stack(out, 1).tolist() if out else [[] for _ in prompts]
    return [[t for t in row if t >= 0] for row in ids], cache


def sample(logits: Tensor, top_p: float, noise: Tensor) -> Tensor:
    """Nucleus sampling by inverting the cumulative sum at noise in [0, 1): logits (B, V), noise (B) -> ids (B)."""
    p, ids = logits.float().softmax(-1).sort(-1, descending=True)
    p = p * (p.cumsum(-1) - p < top_p)  # the smallest set whose mass reaches top_p
    c = p.cumsum(-1)
    index = (c <= noise[:, None] * c[:, -1:]).sum(-1).clamp(max=p.shape[-1] - 1)
    return ids.gather(-1, index[:, None])[:, 0]


# ----------------------------------------------------------------------------- command line


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line."""

    def error(self, message: str):
        raise UserError(f"{message} (see {self.prog} --help)")


def cli(main) -> None:
    """Run main(); a UserError becomes one line on stderr and exit status 2, Ctrl-C status 130."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of our output went away: `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


def pick_device(name: str) -> torch.device:
    """--device: auto takes CUDA where there is one. UserError: cuda asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no CUDA device here: use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def use_cores() -> None:
    """As many torch threads as this process may use cores; OMP_NUM_THREADS overrides."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def main() -> None:
    """Print the card of a shape and the memory table of every variant; the last line is the same as JSON."""
    parser = Parser(description="The memory table: what every variant keeps under one budget.")
    parser.add_argument("--shape", choices=PRESETS, default="qwen3-4b")
    parser.add_argument("--budget", type=int, help="tokens of memory a layer (default 576; 72 for mini)")
    args = parser.parse_args()
    shape = PRESETS[args.shape]
    budget = BUDGET.get(shape.name, 576) if args.budget is None else args.budget
    if budget < 1:
        raise UserError(f"--budget {budget}: must be at least 1 token")
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Decoder(shape, VARIANTS["full"]).parameters())
    token = token_bytes(shape)
    card = {"shape": shape.name, "layers": shape.layers, "parameters": parameters, "budget": budget,
            "bytes_per_token_per_layer": token, "bytes_per_token": token * shape.layers,
            "budget_bytes_per_layer": token * budget, "budget_bytes": token * budget * shape.layers}
    print(f"{shape.name}: {shape.layers} layers, width {shape.width}, {shape.heads} query heads on {shape.kv_heads} "
          f"key/value heads of {shape.head_dim}, {parameters:,} parameters")
    print(f"one cached token: {token:,} B a layer, {card['bytes_per_token'] / 1024:g} KiB in all layers (bfloat16)")
    print(f"budget: {budget} tokens = {token * budget / 2**20:.4g} MiB a layer, {card['budget_bytes'] / 2**20:.4g} MiB a model\n")
    print(f"{'variant':<22}{'window':>8}{'sinks':>9}{'state':>16}{'B/layer':>12}{'nominal':>10}{'exact':>10}{'MiB/model':>11}{'new params':>13}")
    rows, misfits = [], []
    for row in VARIANTS.values():
        try:
            r = memory_row(shape, row, budget)
            window = {None: "all", False: "-", True: r["window"]}[row.window]
        except UserError as error:
            misfits.append(str(error))
            r, window = memory_row(shape, row, None), "no fit"
        rows.append(r)
        sinks = str(row.keep) if row.keep else "learned" if row.learned_sink else "-"
        cells = ["-"] * 4 if r["bytes_per_layer"] is None else [
            f"{r['bytes_per_layer']:,}", f"{r['tokens_nominal']:.2f}", f"{r['tokens_exact']:.2f}",
            f"{r['bytes_per_layer'] * shape.layers / 2**20:.4g}"]
        state = f"per {r['state']} head" if row.far else "-"
        print(f"{row.name:<22}{window:>8}{sinks:>9}{state:>16}{cells[0]:>12}{cells[1]:>10}{cells[2]:>10}{cells[3]:>11}{r['parameters']:>13,}")
    print("\nnominal counts the matrix states alone, as [B] does; exact counts every byte (normaliser and stabiliser too).")
    print(json.dumps({"card": card, "variants": rows}))
    if misfits:
        raise UserError(misfits[0] + f"; rows that do not fit: {len(misfits)}")


if __name__ == "__main__":
    cli(main)
