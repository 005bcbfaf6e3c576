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
    python reference.py --explain bifocal           # one row: words, equation, bytes, what a query sees

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
from dataclasses import dataclass, replace

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


def check_heads(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """ValueError unless q (B, T, H, D), k (B, T, Hk, D) and v (B, T, Hk, Dv) fit together and Hk divides H."""
    sizes = " and ".join(f"{name} {tuple(x.shape)}" for name, x in dict(q=q, k=k, v=v).items())
    if not q.ndim == k.ndim == v.ndim == 4 or not q.shape[:2] == k.shape[:2] == v.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{op}: {sizes} must be (batch, time, heads, head dim) of one batch, time and head dim")
    if not k.shape[2] or k.shape[2] != v.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(f"{op}: {sizes}: k and v need the same heads, and q a multiple of them")


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
                  q_keep: Tensor | None = None, kept: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention over the keys that `mask` (B, T, S) shows.

    q (B, T, H, D); k, v (B, S, Hk, D); sink (H) or None. Returns o (B, T, H, D), lse (B, T, H), the log-sum-exp of
    the visible scores without the sink, and their maximum (B, T, H). A row that sees nothing: o = 0, the others -inf.

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
    lse, peak = (x.permute(0, 3, 1, 2).reshape(B, T, H) for x in (lse, a.amax(-1) if a.numel() else lse))
    if sink is not None:
        share = torch.sigmoid(lse - sink).masked_fill(lse == -math.inf, 0)       # (3)
        o = o * share[..., None]
    return o, lse, peak


def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, *, window: int | None = None, keep: int = 0,
           segment: Tensor | None = None, q_keep: Tensor | None = None, return_lse: bool = False, return_peak: bool = False):
    """Causal attention of a whole sequence with a window and sinks: (1), (2), (3).

    q (B, T, H, D); k, v (B, T, Hk, D); sink (H): one learned logit per query head; window: W or None for all;
    keep: N; segment (B, T): a new document begins where it changes, and documents do not see each other; q_keep:
    see `attend_masked`. Returns o (B, T, H, D), or (o, lse (B, T, H)) with return_lse, or (o, lse, greatest score) with
    return_peak.
    Sources: FlashAttention's window (W-1, 0); StreamingLLM; gpt-oss.
    """
    check_heads("attend", q, k, v)
    B, T = q.shape[:2]
    if segment is None:
        position = torch.arange(T, device=q.device).expand(B, T)
        mask = visible(position, position, window=window, keep=keep)
    else:
        position, document = document_positions(segment), _starts(segment).cumsum(1)
        index = torch.arange(T, device=q.device)
        mask = visible(position, position, window=window, keep=keep) & (index[:, None] >= index)
        mask &= document[:, :, None] == document[:, None, :]
    o, lse, peak = attend_masked(q, k, v, mask, sink, q_keep=q_keep, kept=position < keep)
    return (o, lse, peak) if return_peak else (o, lse) if return_lse else o


def slot_positions(seen: Tensor, keep: int, slots: int) -> Tensor:
    """Position that each slot of the cache holds after `seen` (B) tokens, (B, N + slots); -1 where empty.

    Sink slot s holds s. Ring slot j holds the newest p < seen with p >= N and (p - N) mod slots = j.
    """
    sinks = torch.arange(keep, device=seen.device).expand(len(seen), -1)
    sinks = torch.where(sinks < seen[:, None], sinks, -1)
    last = seen[:, None] - 1
    ring = last - (last - keep - torch.arange(slots, device=seen.device)) % slots
    return torch.cat([sinks, torch.where(ring >= keep, ring, -1)], 1)


def attend_step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor, sink: Tensor | None = None, *,
                keep: int = 0, q_keep: Tensor | None = None) -> Tensor:
    """`attend` for one token of each row, through the ring that holds the tokens before it: (1), (2), (3).

    q, q_keep (B, 1, H, D); k, v (B, 1, Hk, D); keys, values (B, N+W, Hk, D), see `layer_cache`, updated in place; position (B): the
    token's, -1 in a padded row, which writes nothing and gets o = 0. k and v are rounded to the cache's dtype before any use.
    Returns o (B, 1, H, D).
    """
    rows, slots = torch.arange(len(q), device=q.device), keys.shape[1] - keep
    slot = torch.where(position < keep, position.clamp(min=0), keep + (position - keep) % slots)
    for cache, new in ((keys, k), (values, v)):
        cache[rows, slot] = torch.where((position >= 0)[:, None, None], new[:, 0].to(cache.dtype), cache[rows, slot])
    held = slot_positions(position + 1, keep, slots)                             # (B, N+W), all in reach
    return attend_masked(q, keys.to(q.dtype), values.to(q.dtype), (held >= 0)[:, None], sink, q_keep=q_keep, kept=held < keep)[0]


# ----------------------------------------------------------------------------- ops: far


def mlstm_state(B: int, Hs: int, D: int, *, m0: float = 0.0, dtype=torch.float32, device=None) -> tuple[Tensor, ...]:
    """The empty state of `mlstm`: C (B, Hs, D, D), n (B, Hs, D), m (B, Hs) = m0."""
    new = dict(dtype=dtype, device=device)
    return torch.zeros(B, Hs, D, D, **new), torch.zeros(B, Hs, D, **new), torch.full((B, Hs), m0, **new)


def mlstm(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, *, state: tuple[Tensor, ...] | None = None,
          segment: Tensor | None = None, normalizer: str = "floor", scale: float | None = None, m0: float = 0.0):
    """The stabilised mLSTM recurrence of [X], one state per head of k.

    q (B, T, H, D); k, v (B, T, Hs, D); i, f (B, T, Hs) pre-activations; Hs divides H and query head h*R + r
    reads state h. Returns o (B, T, H, D) in q's dtype and the state (C (B, Hs, D, D), n (B, Hs, D), m (B, Hs)), float32 at least.

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
    check_heads("mlstm", q, k, v)
    B, T, H, D = q.shape
    Hs, given = k.shape[2], q.dtype
    dtype = torch.promote_types(given, torch.float32)
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
    return o.to(given), (C, n, m)


def mlstm_step(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, C: Tensor, n: Tensor, m: Tensor, *,
               position: Tensor | None = None, normalizer: str = "floor", scale: float | None = None) -> Tensor:
    """`mlstm` for one token of each row: (4)-(7), with C, n, m updated in place.

    q (B, 1, H, D); k (B, 1, Hs, D); i, f (B, 1, Hs); v (B, 1, Hs, D), or with fewer heads, each read by as many states in a row;
    position (B): -1 in a padded row, whose state stays and whose o is 0. Returns o (B, 1, H, D).
    """
    v = v.repeat_interleave(C.shape[1] // v.shape[2], 2)
    o, state = mlstm(q, k, v, i, f, state=(C, n, m), normalizer=normalizer, scale=scale)
    live = torch.ones(len(q), dtype=torch.bool, device=q.device) if position is None else position >= 0
    for old, new in zip((C, n, m), state):
        old.copy_(torch.where(live.reshape(-1, *[1] * (old.ndim - 1)), new, old))
    return torch.where(live[:, None, None, None], o, 0)


def bifocal_step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor, q_far: Tensor, k_far: Tensor, i: Tensor,
                 f: Tensor, C: Tensor, n: Tensor, m: Tensor, gate: Tensor, sink: Tensor | None = None, *, keep: int = 0,
                 q_keep: Tensor | None = None, normalizer: str = "floor", scale: float | None = None) -> Tensor:
    """`attend_step` and `mlstm_step` of one token, mixed by gate (B, 1, H): o = g far + (1-g) near, (11). v is both sides'."""
    near = attend_step(q, k, v, keys, values, position, sink, keep=keep, q_keep=q_keep)
    far = mlstm_step(q_far, k_far, v, i, f, C, n, m, position=position, normalizer=normalizer, scale=scale)
    return gate[..., None] * far.to(q.dtype) + (1 - gate[..., None]) * near                  # (11)


def mlstm_denominator(den: Tensor, m: Tensor, normalizer: str) -> Tensor:
    """The denominator of (7) from n . q and m."""
    if normalizer == "floor":
        return torch.maximum(den.abs(), (-m).exp().clamp(min=torch.finfo(den.dtype).tiny))  # both may underflow: 0/0
    return den + torch.finfo(den.dtype).tiny


def scan(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor | None = None, *, state: Tensor | None = None,
         segment: Tensor | None = None, bonus: Tensor | None = None):
    """Linear attention with decay, one state per head of k.

    q (B, T, H, D); k (B, T, Hs, D); v (B, T, Hs, Dv); log_a: the log of the decay, (B, T, Hs) one number per head,
    (B, T, Hs, D) one per row of the state, or None for no decay: at most 0. Returns o (B, T, H, Dv) in q's dtype and C (B, Hs, D, Dv),
    float32 at least.

        C_t = diag(e^log_a_t) C_{t-1} + k_t v_t^T,    o_t = C_t^T q_t                       (8)

    bonus u (Hs, D): o_t = (C_{t-1} + diag(u) k_t v_t^T)^T q_t, the state is read before it decays (RWKV-6).
    A normaliser is one more column of v, of ones. segment: see `mlstm`. A padded step is k = 0, log_a = 0.
    Sources: linear attention, arXiv 2006.16236; GLA, 2312.06635; Mamba-2, 2405.21060.
    """
    return _recur(q, k, v, log_a, None, None, state, segment, bonus)


def delta(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor | None, b: Tensor, c: Tensor, *, state: Tensor | None = None,
          segment: Tensor | None = None):
    """The delta rule: a diagonal decay and a rank-one correction, one state per head of k.

    As `scan`, with b and c (B, T, Hs, D). Returns o (B, T, H, Dv) and C (B, Hs, D, Dv).

        C_t = (diag(e^log_a_t) + b_t c_t^T) C_{t-1} + k_t v_t^T,    o_t = C_t^T q_t         (9)

    Gated delta (arXiv 2412.06464), C' = a C_{t-1}, C_t = C' + beta k (v - C'^T k)^T: b = -beta k, c = a k, beta k written.
    RWKV-7 (2503.14456): b = -(rate * kappa), c = kappa: the removal reads the undecayed state. A padded step has b = 0 too.
    """
    return _recur(q, k, v, log_a, b, c, state, segment, None)


def _recur(q, k, v, log_a, b, c, state, segment, bonus):
    """(8) and (9), step by step."""
    check_heads("scan" if b is None else "delta", q, k, v)
    B, T, H, D = q.shape
    Hs, Dv, given = k.shape[2], v.shape[3], q.dtype
    dtype = torch.promote_types(given, torch.float32)
    q, k, v, log_a, b, c, bonus = (x if x is None else x.to(dtype) for x in (q, k, v, log_a, b, c, bonus))
    q = q.reshape(B, T, Hs, H // Hs, D)
    C = q.new_zeros(B, Hs, D, Dv) if state is None else state
    starts, out = None if segment is None else _starts(segment), []
    for t in range(T):
        if starts is not None:
            C = C.masked_fill(starts[:, t, None, None, None], 0)
        old, new = C, k[:, t, :, :, None] * v[:, t, :, None, :]
        if log_a is not None:
            C = C * log_a[:, t].reshape(B, Hs, -1, 1).exp()
        if b is not None:
            C = C + b[:, t, :, :, None] * torch.einsum("bhd,bhde->bhe", c[:, t], old)[:, :, None]
        C = C + new                                                                        # (8), (9)
        out.append(torch.einsum("bhrd,bhde->bhre", q[:, t], C if bonus is None else old + bonus[..., None] * new))
    return (torch.stack(out, 1).reshape(B, T, H, Dv) if out else q.new_zeros(B, 0, H, Dv)).to(given), C


def quadratic(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor | None = None, b: Tensor | None = None, c: Tensor | None = None,
              *, state: Tensor | None = None, segment: Tensor | None = None, bonus: Tensor | None = None):
    """(8) and (9) as masked matrices over all pairs of steps; arguments and results of `scan` and `delta`.

    With E_ts = e^{log_a_{s+1} + ... + log_a_t} (per row of the state), C_0 the state before the first step and
    [x, y]_ts = sum_d x_td E_tsd y_sd for s <= t, [x, y)_ts the same with E_{t-1,s} for s < t:

        u_t = C_{t-1}^T c_t:     (1 - [c, b)) U = [c, k) V + (c e^{log_a up to t-1}) C_0       (10)
        O = [q, k] V + [q, b] U + (q e^{log_a up to t}) C_0

    A chunk of fast.py is this on C steps: between chunks goes the state.
    """
    check_heads("scan" if b is None else "delta", q, k, v)
    B, T, H, D = q.shape
    Hs, Dv, given = k.shape[2], v.shape[3], q.dtype
    dtype = torch.promote_types(given, torch.float32)
    q = q.to(dtype).reshape(B, T, Hs, H // Hs, D).permute(0, 2, 3, 1, 4)                      # (B, Hs, R, T, D)
    k, v, b, c = (x if x is None else x.to(dtype).transpose(1, 2) for x in (k, v, b, c))      # (B, Hs, T, D)
    C = q.new_zeros(B, Hs, D, Dv) if state is None else state
    if T == 0:
        return q.new_zeros(B, 0, H, Dv, dtype=given), C
    g = q.new_zeros(B, Hs, T, 1) if log_a is None else log_a.to(dtype).reshape(B, T, Hs, -1).transpose(1, 2)
    document = torch.zeros(B, T, device=q.device) if segment is None else _starts(segment).cumsum(1)
    live = (document == 0)[:, None, :, None]  # steps that still see C_0
    seen = (document[:, :, None] == document[:, None, :]).tril()[:, None, :, :, None]         # (B, 1, T, T, 1)
    below = torch.ones(T, T, dtype=torch.bool, device=q.device).tril(-1)[:, :, None]
    # each sum of log decays is added up from its own steps: a difference of two running sums loses what a strong decay swallows
    sums, total = torch.where(below, g[:, :, :, None], 0).cumsum(2), g.cumsum(2)              # (B, Hs, T, T, .), (B, Hs, T, .)
    E, carry = sums.masked_fill(~seen, -math.inf).exp(), total.masked_fill(~live, -math.inf).exp()
    carry_before = F.pad(total[:, :, :-1], (0, 0, 1, 0)).masked_fill(~live, -math.inf).exp()
    later = c[:, :, None] if c is not None else q if bonus is not None else q[:, :, :0]  # what reads the state before its step
    x = torch.cat([q, F.pad(later[..., 1:, :], (0, 0, 0, 1))], 2)  # [x, y)_t is row t-1 of [x one step later, y]

    def pairs(y):  # [q, y] and [later, y): (B, Hs, R or 1, T, T)
        if E.shape[-1] == 1:
            p = (x @ y[:, :, None].transpose(-1, -2)) * E[:, :, None, ..., 0]
        else:
            p = torch.einsum("bhrtd,bhtsd->bhrts", x, E * y[:, :, None])
        now, then = p.split([H // Hs, p.shape[2] - H // Hs], 2)
        return now, F.pad(then[..., :-1, :], (0, 0, 1, 0)) * seen[:, :, None, ..., 0]

    qk, ck = pairs(k)
    if bonus is None:
        o = qk @ v[:, :, None] + (q * carry[:, :, None]) @ C[:, :, None]
    else:
        now = torch.einsum("bhrtd,bhtd->bhrt", q, bonus.to(dtype)[:, None] * k)
        o = ck @ v[:, :, None] + now[..., None] * v[:, :, None] + (q * carry_before[:, :, None]) @ C[:, :, None]
    last = E[:, :, -1]                                                                        # (B, Hs, T, .)
    new = carry[:, :, -1, :, None] * C + (last * k).transpose(-1, -2) @ v
    if b is not None:
        qb, cb = pairs(b)
        right = ck[:, :, 0] @ v + (c * carry_before) @ C
        left = torch.eye(T, dtype=dtype, device=q.device) - cb[:, :, 0]
        U = torch.linalg.solve_triangular(left, right, upper=False, unitriangular=True)       # (10)
        o, new = o + qb @ U[:, :, None], new + (last * b).transpose(-1, -2) @ U
    return o.permute(0, 3, 1, 2, 4).reshape(B, T, H, Dv).to(given), new


# ----------------------------------------------------------------------------- ops: the loss of a distillation


def distill_loss(hidden: Tensor, weight: Tensor, target, labels: Tensor | None = None, *, ce: float = 0.0,
                 temperature: float = 1.0) -> Tensor:
    """The mean over M tokens of the divergence from the teacher, with a share `ce` of cross entropy; 0 if M = 0.

        L = (1-ce) tau^2 KL(p || q) + ce (-log q_1[label]),    p, q = softmax(teacher / tau), softmax(student / tau)      (13)

    hidden (M, E), weight (V, E): the student's logits are hidden weight^T. target, the teacher: its logits (M, V); or its K
    greatest, (values (M, K), indices (M, K) of int64), renormalised among themselves, the rest taken as 0; or (hidden (M, E'),
    weight (V, E')). labels (M): needed if ce > 0. q_1 is q at tau = 1. No gradient reaches the target. In float32 at least.
    Raises ValueError for ce outside [0, 1], tau <= 0, ce > 0 without labels, labels that are no ids, or a target of other sizes.
    Sources: [P]; the factor tau^2, arXiv 1503.02531.
    """
    check_loss(hidden, weight, target, labels, ce, temperature)
    if not len(hidden):
        return (hidden.sum() + weight[:0].sum()).to(torch.promote_types(hidden.dtype, torch.float32))
    z = hidden @ weight.T                                                                     # (M, V)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    loss = z.new_zeros(())
    if ce < 1:
        values, indices = target if _is_top(target) else (target if torch.is_tensor(target) else target[0] @ target[1].T, None)
        log_p = (values.detach().to(z.dtype) / temperature).log_softmax(-1)
        log_q = (z / temperature).log_softmax(-1)
        log_q = log_q if indices is None else log_q.gather(-1, indices)
        loss = (1 - ce) * temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1).mean()     # (13)
    return loss + ce * F.cross_entropy(z, labels) if ce else loss


def check_loss(hidden: Tensor, weight: Tensor, target, labels: Tensor | None, ce: float, temperature: float) -> None:
    """Raises the ValueErrors of `distill_loss`."""
    M, V = len(hidden), len(weight)
    if not 0 <= ce <= 1 or temperature <= 0:
        raise ValueError(f"ce {ce} must be in [0, 1] and temperature {temperature} > 0")
    if ce and labels is None:
        raise ValueError(f"ce {ce} needs labels")
    if ce and (labels.shape != (M,) or ((labels < 0) | (labels >= V)).any()):
        raise ValueError(f"labels must be {M} ids from 0 to {V - 1}")
    if ce == 1:
        return
    if _is_top(target):
        fits = target[0].shape == target[1].shape and len(target[0]) == M
    else:
        fits = (target.shape if torch.is_tensor(target) else (len(target[0]), len(target[1]))) == (M, V)
    if not fits:
        sizes = [tuple(x.shape) for x in ([target] if torch.is_tensor(target) else target)]
        raise ValueError(f"target {' and '.join(map(str, sizes))} is not of {M} tokens and a vocabulary of {V}")


def _is_top(target) -> bool:
    """Whether a target of `distill_loss` is (values, indices)."""
    return not torch.is_tensor(target) and not target[1].is_floating_point()


# ----------------------------------------------------------------------------- variants: the registry


CONV = 4  # taps of the convolution
SHIFTS = ("lerp", "ddlerp")
FIXED_DECAYS = ("none", "alibi", "retnet", "dijiang")
POSITIVE = ("softmax", "softmax_pm", "elu", "relu")
SHARED = ("shared", "shared_complement")

# Every word of a row and what it means. x is the layer's normalised input, h a head, W and b learned, l a low-rank map A B x.
WORDS = {
    "recurrence": {"scan": "C_t = diag(a_t) C_{t-1} + k_t v_t^T, o_t = C_t^T q_t (8)",
                   "delta": "C_t = (diag(a_t) + b_t c_t^T) C_{t-1} + k_t v_t^T, o_t = C_t^T q_t (9)",
                   "mlstm": "C_t = f' C_{t-1} + i' k_t v_t^T, o_t = C_t^T q_t, stabilised (4)-(7)"},
    "state_per": {"kv": "one state per key/value head; its query heads read the same one, and what belongs to the key side (feature "
                        "map, gates, bonus) is the key/value head's", "query": "one state per query head, k and v repeated"},
    "inputs": {"x": "q, k, v and the gates are made from x", "conv": "q, k, v go through a causal depthwise convolution over 4 tokens",
               "conv_silu": "q, k, v go through a causal depthwise convolution over 4 tokens, then SiLU",
               "lerp": "token shift: q, k, v and the gates each from x_t + mu (x_{t-1} - x_t)",
               "ddlerp": "token shift with mu = l(x_t + mu_0 (x_{t-1} - x_t)), tanh inside (RWKV-6)"},
    "rotary": {"none": "no rotary embedding", "before": "rotary before the feature map", "after": "rotary after the feature map"},
    "map": {"none": "no map", "head": "W y, D x D per head", "head_bias": "W y + b, D x D per head", "half": "W y, D x D/2 per head",
            "dense": "W y + b over all heads together", "dct": "a fixed cosine transform, its columns times draws of N(0, 1)"},
    "features": {"identity": "phi(y) = y", "l2": "phi(y) = y / |y|", "softmax": "phi(y) = softmax(y)", "elu": "phi(y) = elu(y) + 1",
                 "softmax_pm": "phi(y) = [softmax(y); softmax(-y)]", "relu": "phi(y) = relu(y)"},
    "decay": {"none": "a = 1", "alibi": "log a = -2^(-8(h+1)/H), fixed", "retnet": "a = 1 - 2^(-5-h), fixed",
              "dijiang": "a = 1 - exp(linspace(log 1/32, log 1/512, H)), fixed",
              "softplus": "log a = -A softplus(w.x + b), per head", "sigmoid": "a = sigmoid(-(w.x + b)), per head",
              "mlstm": "f = sigmoid(w.x + b), per head", "low_rank": "a = sigmoid(l(x))^(1/16), per row of the state",
              "exp": "log a = -exp(w0 + l(x)), tanh inside, per row", "exp_floor": "log a = max(-exp(w0 + l(x)), -5), tanh inside, per row",
              "rwkv7": "log a = -e^(-1/2) sigmoid(w0 + l(x)), tanh inside, per row",
              "key": "a = sigmoid(k)^(1/16), per row, k before the teacher's norm"},
    "write": {"one": "k v^T as it is", "dt": "v times the step softplus(w.x + b) of the decay", "keep_less": "k (1 - a)",
              "exp": "i = exp(w.x + b), the exponent soft-capped at 15", "beta": "beta = sigmoid(w.x + b): b = -beta k, c = a k, beta k written",
              "rwkv7": "r = sigmoid(l(x)): c = k k_k / |k k_k|, b = -r c, k (1 + (r-1) k_a) written",
              "rad_rwkv7": "r = sigmoid(l(x)): c = k / |k|, b = -r c, k (1 - a + r) written"},
    "normalizer": {"none": "no normaliser", "plain": "o / (n . q), n the same sum of k", "floor": "o / max(|n . q|, 1), unscaled"},
    "extra": {"none": "", "skip": "+ D_h v_t", "bonus": "o_t = (C_{t-1} + diag(u) k_t v_t^T)^T q_t: read before the decay, (8)",
              "bonus7": "+ (q_t . r k_t) v_t, after the norm, k_t as it is written"},
    "output_norm": {"none": "no norm", "group": "mean 0 and variance 1 per head", "layer": "layer norm per head, with weights",
                    "rms": "RMS norm per head, with weights", "rms_gated": "RMS norm over all heads, after the gate, with weights"},
    "output_gate": {"none": "no gate", "silu": "o SiLU(W x)", "sigmoid": "o sigmoid(W x), W = 0 at the start",
                    "silu_one": "o SiLU(W x + b), 1 at the start", "low_rank": "o A sigmoid(B x), about 1 at the start"},
    "sink_positions": {"original": "a sink keeps its true distance: what training with a mask gives",
                       "in-cache": "a key's position is its index in the cache (StreamingLLM)"},
    "mix": {None: "one branch", "gate": "o = g far + (1-g) near, g = sigmoid([q; k; v].w + b) per query head (11)",
            "half": "o = (far + near) / 2", "shared": "one softmax normaliser for both (12)",
            "shared_complement": "one normaliser, the state's part times 1 - gamma (12)"},
}


@dataclass(frozen=True)
class Far:
    """What a layer keeps in summary: one recurrence and the words, all in WORDS, for what enters and leaves it.

    normed: q and k enter after the teacher's q/k norm, if it has one. scaled: q times 1/sqrt(D).
    value_residual: v moves towards the first layer's v by a low-rank gate (RWKV-7).
    left: the state holds only the tokens that have left the window (LoLCATs).
    """

    recurrence: str = "scan"
    state_per: str = "query"
    inputs: str = "x"
    normed: bool = True
    rotary: str = "none"
    map: str = "none"
    features: str = "identity"
    scaled: bool = False
    decay: str = "none"
    write: str = "one"
    normalizer: str = "none"
    extra: str = "none"
    output_norm: str = "none"
    output_gate: str = "none"
    value_residual: bool = False
    left: bool = False


FARS = {
    "linear": Far(state_per="kv", rotary="before", features="elu", normalizer="plain"),
    "t2r": Far(map="head_bias", features="relu", normalizer="plain"),
    "hedgehog": Far(rotary="before", map="half", features="softmax_pm", normalizer="plain"),
    "supra": Far(rotary="after", map="dense", features="relu", scaled=True, decay="alibi", output_norm="group"),
    "dijiang": Far(state_per="kv", rotary="before", map="dct", features="softmax", decay="dijiang", output_norm="group",
                   output_gate="silu"),
    "qlinatt": Far(state_per="kv", rotary="before", output_norm="layer"),
    "mlstm": Far(recurrence="mlstm", map="head", features="l2", decay="mlstm", write="exp", normalizer="floor"),
    "mamba2": Far(inputs="conv_silu", decay="softplus", write="dt", extra="skip", output_norm="rms_gated", output_gate="silu"),
    "mamba2_discrete": Far(inputs="conv", decay="sigmoid", extra="skip", output_gate="silu_one"),
    "gla": Far(scaled=True, decay="low_rank", output_norm="rms", output_gate="silu"),
    "liger_gla": Far(state_per="kv", features="softmax", decay="key"),
    "rwkv6": Far(inputs="ddlerp", decay="exp", extra="bonus", output_norm="layer", output_gate="silu"),
    "rad_rwkv6": Far(inputs="ddlerp", scaled=True, decay="exp_floor", write="keep_less", output_gate="sigmoid"),
    "rwkv7": Far(recurrence="delta", inputs="lerp", decay="rwkv7", write="rwkv7", extra="bonus7", output_norm="layer",
                 output_gate="low_rank", value_residual=True),
    "rad_rwkv7": Far(recurrence="delta", rotary="before", scaled=True, decay="rwkv7", write="rad_rwkv7",
                     output_gate="low_rank", value_residual=True),
    "gdn": Far(recurrence="delta", inputs="conv_silu", features="l2", scaled=True, decay="softplus", write="beta",
               output_norm="rms", output_gate="silu"),
}


@dataclass(frozen=True)
class Variant:
    """One row: what a layer keeps exactly, what it summarises, how it mixes them.

    window          True = a window that spends what is left of the budget; False = no softmax branch; None = keep everything
    keep            N, the kept sink tokens
    learned_sink    one logit per query head
    sink_positions  a word of WORDS
    far             a `Far`, or None
    mix             a word of WORDS
    strict          the window fits the budget with every byte counted, not the matrix states alone
    """

    name: str
    note: str
    window: bool | None = True
    keep: int = 0
    learned_sink: bool = False
    sink_positions: str = "original"
    far: Far | None = None
    mix: str | None = None
    strict: bool = False


def _alone(name: str, note: str) -> Variant:
    return Variant(name, note, window=False, far=FARS[name])


ROWS = [
    Variant("full", "every key: the teacher", window=None),
    Variant("swa", "a sliding window alone"),
    Variant("swa_sink_tokens", "a window and the first 4 tokens", keep=4),
    Variant("swa_learned_sink", "a window and a learned sink logit", learned_sink=True),
    Variant("bifocal", "a large window and a state per kv head, gated", learned_sink=True,
            far=replace(FARS["mlstm"], state_per="kv"), mix="gate"),
    Variant("bifocal_state", "a small window and a state per query head, gated", learned_sink=True, far=FARS["mlstm"], mix="gate"),
    _alone("linear", "linear attention: a sum of all pairs, normalised (2006.16236)"),
    _alone("t2r", "a learned ReLU feature map (T2R, 2103.13076)"),
    _alone("hedgehog", "a learned softmax feature map (2402.04347)"),
    _alone("supra", "ReLU features, fixed decay, a group norm for the normaliser (2405.06640)"),
    _alone("dijiang", "random cosine features, fixed decay (2403.19928)"),
    _alone("qlinatt", "q and k as they are, a layer norm for the normaliser (2505.03005, A.3)"),
    _alone("mlstm", "input and forget gates, a normaliser with a floor (2405.04517)"),
    _alone("mamba2", "one step size for decay and write, a convolution before (2405.21060)"),
    _alone("mamba2_discrete", "decay alone from the input (MOHAWK 2408.10189, Llamba 2502.14458)"),
    _alone("gla", "a decay for each row of the state (2312.06635)"),
    Variant("liger_gla", "GLA with gates from the keys, half a window (2503.01496)", far=FARS["liger_gla"], mix="half"),
    _alone("rwkv6", "a decay per row, a bonus for the current token (2404.05892)"),
    _alone("rad_rwkv6", "RWKV-6 made easy to convert to (QRWKV6, 2505.03005, A.1)"),
    _alone("rwkv7", "a decay per row and a generalised delta rule (2503.14456, ARWKV 2501.15570)"),
    _alone("rad_rwkv7", "RWKV-7 made easy to convert to (QRWKV7, 2505.03005, A.2)"),
    _alone("gdn", "the gated delta rule: erase what the key points at, then write (2412.06464)"),
    Variant("lolcats", "a window, and in one softmax with it a Hedgehog state of what left it (2410.10254)",
            far=replace(FARS["hedgehog"], left=True), mix="shared"),
]
# Where a window shares its budget with a state, the two ways to count differ: a strict twin each.
VARIANTS = {row.name: row for row in ROWS}
VARIANTS |= {f"{row.name}_strict": replace(row, name=f"{row.name}_strict", strict=True)
             for row in ROWS if row.window and row.far}


def find_variant(name: str) -> Variant:
    """The row of that name. Raises UserError with the names there are."""
    if name not in VARIANTS:
        raise UserError(f"variant {name!r} is not one of: {' '.join(VARIANTS)}")
    return VARIANTS[name]


def combine(name: str, far: str | None = None, mix: str | None = None, settings: list[str] = ()) -> Variant:
    """The row of that name with another far part (a name of FARS, or 'none'), another mix, and fields changed by
    "field=value" settings, of Variant or of its Far.

    A far part keeps the row's `state_per`; a row without a window gets one if it is given a mix. Raises UserError for
    what it cannot read or make sense of.
    """
    row = find_variant(name)
    if far is not None:
        if far != "none" and far not in FARS:
            raise UserError(f"--far {far}: not one of: none {' '.join(FARS)}")
        part = None if far == "none" else FARS[far] if row.far is None else replace(FARS[far], state_per=row.far.state_per)
        row = replace(row, name=f"{row.name}+{far}", note=f"{row.name} with the far part {far}", far=part,
                      mix=None if part is None else row.mix)
    if mix is not None:
        settings = [f"mix={mix}", *settings]
        row = replace(row, name=f"{row.name}+{mix}", window=row.window is not False or mix != "none")
    if settings:
        row = replace(row, name="+".join([row.name, *settings[mix is not None :]]), note=f"{row.note}; changed: {' '.join(settings)}")
    for setting in settings:
        field, _, value = setting.partition("=")
        near, fars = ({f.name: f for f in dataclasses.fields(kind)} for kind in (Variant, Far))
        known = (near.keys() - {"name", "note", "far"}) | (fars.keys() if row.far else set())
        if field not in known:
            raise UserError(f"--row {setting}: write FIELD=VALUE with one of {' '.join(sorted(known))}")
        kind = type((near | fars)[field].default)
        try:
            value = {"none": "none" if field in fars else None, "true": True, "false": False}.get(
                value.lower(), int(value) if kind is int else value)
        except ValueError:
            raise UserError(f"--row {setting}: {field} is a whole number") from None
        if kind is bool and not isinstance(value, bool) and (field, value) != ("window", None):
            raise UserError(f"--row {setting}: {field} is true or false" + (" or none" if field == "window" else ""))
        row = replace(row, **{field: value}) if field in near else replace(row, far=replace(row.far, **{field: value}))
    check_variant(row)
    return row


def check_variant(row: Variant) -> None:
    """Raises UserError for a word the layer does not know, or a row that makes no sense."""
    far = row.far
    for part in (row, far) if far else (row,):
        for field, known in WORDS.items():
            if getattr(part, field, next(iter(known))) not in known:
                raise UserError(f"variant {row.name}: {field} {getattr(part, field)!r} is not one of: {' '.join(map(str, known))}")

    def need(condition, message):
        if not condition:
            raise UserError(f"variant {row.name}: {message}")

    two = far is not None and row.window is not False
    need(two or row.mix is None, f"mix {row.mix!r} needs two branches, a window and a state")
    need(not two or row.mix is not None, "two branches, a window and a state, need a mix")
    need(far or row.window is not False, "keeps nothing: it needs a window or a state")
    need(not row.keep or row.window is not None, f"it keeps every token, so keep={row.keep} adds nothing: leave it out")
    need(row.keep >= 0 and (row.window is not False or not row.keep and not row.learned_sink), "sinks need a window, and keep >= 0")
    if far is None:
        return
    mlstm, delta = far.recurrence == "mlstm", far.recurrence == "delta"
    need(mlstm == (far.decay == "mlstm") == (far.write == "exp"), "recurrence, decay and write of mlstm go together")
    need(delta == (far.write in ("beta", "rwkv7", "rad_rwkv7")), "recurrence=delta goes with write beta, rwkv7 or rad_rwkv7")
    need(far.normalizer == "none" or not delta, "a delta rule has no normaliser: normalizer=none")
    need((far.normalizer == "floor") <= mlstm and (far.normalizer != "none" or not mlstm), "normalizer 'floor' and mlstm go together")
    positive = far.features in POSITIVE and far.rotary != "after"
    need(far.normalizer != "plain" or positive, f"normalizer 'plain' needs positive features: features={'|'.join(POSITIVE)}")
    need(far.write != "dt" or far.decay == "softplus", "write=dt is the step size of decay=softplus")
    need(far.write != "keep_less" or far.decay != "none", "write=keep_less needs a decay")
    need(far.write != "rad_rwkv7" or far.decay != "none", "write=rad_rwkv7 needs a decay")
    need(far.extra != "bonus" or far.recurrence == "scan" and far.normalizer == "none", "extra=bonus needs a scan without normaliser")
    if row.mix in SHARED:
        need(far.recurrence == "scan" and far.normalizer == "plain" and far.extra == far.output_norm == far.output_gate == "none",
             f"mix={row.mix} adds numerators and denominators: it needs a scan with normalizer=plain and nothing after it")
    if far.left:
        need(row.window is True and far.rotary == "before" and far.normed and far.inputs == "x" and far.decay in FIXED_DECAYS
             and far.write == "one" and far.extra == "none" and not far.value_residual,
             "left=true remakes what it writes from the window's own keys and values: it needs rotary=before, a fixed decay, no more")


# ----------------------------------------------------------------------------- memory accounting


def layer_cache(shape: Shape, row: Variant, window: int | None, batch: int = 1, *, dtype=torch.bfloat16,
                device=None) -> dict[str, Tensor]:
    """All that one layer holds while decoding `batch` sequences, preallocated.

    k, v (B, N+W, Hk, D) in `dtype`: slot s < N holds sink s, slot N + (p-N) mod W holds position p (a ring).
    Float32 (float64 if dtype is): C (B, Hs, D, D), the matrix state; n (B, Hs, D), the normaliser; m (B, Hs), the stabiliser;
    conv (B, 3, (H + 2 Hk) D) and shift (B, 1, E), the last inputs of a convolution and a token shift. Raises UserError if
    window is None: `full` needs its capacity in tokens.
    """
    cache = {}
    if row.window is not False:
        if window is None:
            raise UserError(f"variant {row.name} keeps every token: give the number of tokens to make room for")
        for name in "kv":
            cache[name] = torch.zeros(batch, row.keep + window, shape.kv_heads, shape.head_dim, dtype=dtype, device=device)
    if row.far:
        H, Hk, D = shape.heads, shape.kv_heads, shape.head_dim
        new = dict(dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)
        C, n, m = mlstm_state(batch, Hk if row.far.state_per == "kv" else H, D, **new)
        cache["C"] = C
        if row.far.normalizer != "none":
            cache["n"] = n
        if row.far.recurrence == "mlstm":
            cache["m"] = m
        if row.far.inputs in ("conv", "conv_silu"):
            cache["conv"] = torch.zeros(batch, CONV - 1, (H + 2 * Hk) * D, **new)
        if row.far.inputs in SHIFTS:
            cache["shift"] = torch.zeros(batch, 1, shape.width, **new)
    return cache


def cache_bytes(cache: dict[str, Tensor], names=None) -> int:
    """Bytes of the tensors of one layer's cache (of those named, if names is given)."""
    return sum(t.numel() * t.element_size() for n, t in cache.items() if names is None or n in names)


def token_bytes(shape: Shape) -> int:
    """Bytes of one cached token in one layer: k and v in bfloat16, 2 * Hk * D * 2."""
    return 2 * shape.kv_heads * shape.head_dim * 2


def solve_window(shape: Shape, row: Variant, budget: int) -> int | None:
    """The window W that spends `budget` (tokens a layer), or None for a row without one.

        nominal: W + N + bytes(C) / token <= budget        strict: W + N + bytes(everything but k, v) / token <= budget

    Raises UserError if the budget cannot hold the state, the sinks and one token of window.
    """
    if row.window is None:
        return None
    least = least_budget(shape, row)
    if budget < least:
        raise UserError(f"--budget {budget} is too small for {row.name} on {shape.name}: it needs at least {least} tokens")
    return budget - least + 1 if row.window else None


def least_budget(shape: Shape, row: Variant) -> int:
    """Tokens a layer that hold the state, the sinks and one token of window, if there is one."""
    state = cache_bytes(layer_cache(shape, row, 0, device="meta"), None if row.strict else "kvC")
    return -(-state // token_bytes(shape)) + (row.window is True)


def new_parameters(shape: Shape, row: Variant) -> int:
    """Parameters that the variant adds to the whole model: sinks, maps, gates."""
    with torch.device("meta"):
        return shape.layers * sum(p.numel() for n, p in Attention(shape, row, 1).named_parameters() if is_new(n))


def memory_row(shape: Shape, row: Variant, budget: int | None, window: int | None = None) -> dict:
    """One line of the memory table, bytes summed over meta tensors of the shapes that decoding allocates.

    The window is the one given, else the one that spends the budget. The sizes are None for `full`, which has no bound,
    and where neither is given.
    """
    out = {"name": row.name, "window": None, "keep": row.keep, "state": row.far.state_per if row.far else None,
           "bytes_per_layer": None, "tokens_nominal": None, "tokens_exact": None, "parameters": new_parameters(shape, row)}
    if row.window is not None and (budget, window) != (None, None):
        out["window"] = solve_window(shape, row, budget) if budget is not None else window
        cache = layer_cache(shape, row, out["window"], device="meta")
        out |= {"bytes_per_layer": cache_bytes(cache), "tokens_nominal": cache_bytes(cache, "kvC") / token_bytes(shape),
                "tokens_exact": cache_bytes(cache) / token_bytes(shape)}
    return out


# ----------------------------------------------------------------------------- the model


NEW = ("sink", "far", "mix_gate", "gamma")


def is_new(name: str) -> bool:
    """Whether a parameter of that name is the variant's own (stage I trains these alone) or the teacher's."""
    return any(part in NEW for part in name.split("."))


class HeadLinear(nn.Module):
    """One D -> D_out map per head: x (B, T, heads, D) -> (B, T, heads, D_out), the identity (or its first columns) at the start."""

    def __init__(self, heads: int, head_dim: int, out: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(head_dim, out).repeat(heads, 1, 1))
        self.bias = nn.Parameter(torch.zeros(heads, out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bthd,hde->bthe", x, self.weight)
        return y if self.bias is None else y + self.bias


class LowRank(nn.Module):
    """x (..., E) -> act(x A) B + bias (..., out): A random, B = 0 at the start."""

    def __init__(self, width: int, rank: int, out: int, bias: Tensor | float = 0.0, act=lambda x: x):
        super().__init__()
        self.down = nn.Parameter(torch.randn(width, rank) * width**-0.5)
        self.up = nn.Parameter(torch.zeros(rank, out))
        self.bias = nn.Parameter(torch.as_tensor(bias, dtype=self.up.dtype).expand(out).clone())
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x @ self.down) @ self.up + self.bias


def gate_of_zero(width: int, out: int, bias: Tensor | float) -> nn.Linear:
    """A linear map with zero weights: at the start the gate is its bias whatever x is."""
    linear = nn.Linear(width, out)
    nn.init.zeros_(linear.weight)
    with torch.no_grad():
        linear.bias.copy_(torch.as_tensor(bias))
    return linear


def fixed_decay(kind: str, heads: int) -> Tensor | None:
    """The log decay of each head (heads) for the words of FIXED_DECAYS; None for no decay."""
    h = torch.arange(heads, dtype=torch.float64)
    if kind == "alibi":  # SUPRA's choice
        return -(2.0 ** (-8 * (h + 1) / heads))
    if kind == "retnet":
        return torch.log1p(-(2.0 ** (-5 - h)))
    if kind == "dijiang":
        return torch.log1p(-torch.linspace(math.log(1 / 32), math.log(1 / 512), heads, dtype=torch.float64).exp())
    return None


def cosine_map(D: int) -> Tensor:
    """DiJiang's fixed map (D, D): orthonormal DCT-II columns, each times a draw of N(0, 1), the same in every run."""
    j = torch.arange(D, dtype=torch.float64)
    dct = torch.cos(math.pi / D * (j[:, None] + 0.5) * j) * (2 / D) ** 0.5
    dct[:, 0] /= 2**0.5
    return (dct * torch.randn(D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).float()


def apply_features(x: Tensor, kind: str) -> Tensor:
    """phi over the last axis, after the map."""
    if kind == "softmax_pm":
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
    return {"identity": lambda: x, "l2": lambda: F.normalize(x, dim=-1, eps=1e-6), "softmax": lambda: x.softmax(-1),
            "elu": lambda: F.elu(x) + 1, "relu": lambda: x.relu()}[kind]()


@dataclass
class Context:
    """What all layers of one forward pass share: where the tokens stand and what they see."""

    rotary: tuple[Tensor, Tensor]  # at the tokens' positions
    rotary_keep: tuple[Tensor, Tensor] | None  # at min(t, N+W-1): the query's in-cache position
    step: Tensor  # (B, T), the tokens' positions in their documents
    segment: Tensor | None = None  # (B, T)
    first_v: Tensor | None = None  # (B, T, Hk, D), layer 0's values, set by layer 0: the value residual
    position: Tensor | None = None  # (B, T), -1 at padded steps; this and what follows only with a cache
    length: Tensor | None = None  # (B), the real tokens of each row
    mask: Tensor | None = None  # (B, T, N+W (+T if T > 1))
    kept: Tensor | None = None  # the mask's key axis: is it a sink?
    write: tuple[Tensor, Tensor, Tensor] | None = None  # (row, slot, step) of every token that enters the ring


class FarBranch(nn.Module):
    """The far part that a row's `Far` describes: features and gates, one recurrence, then the output's norm and gate.

    What our rows simplify: Mamba-2's k and q (B and C) are made per head as the teacher's are, not shared by all heads;
    convolutions act on the key/value heads before they are repeated; RWKV's token shift starts as nothing, w0 follows a
    head's channels, low ranks are max(16, E/32), its channel mixing is the teacher's MLP; where a source has no start that
    keeps the teacher's q, k, v, ours does.
    """

    def __init__(self, shape: Shape, far: Far, window: int | None, keep: int, layer: int, ops):
        super().__init__()
        E, H, Hk, D = shape.width, shape.heads, shape.kv_heads, shape.head_dim
        Hs = Hk if far.state_per == "kv" else H
        self.shape, self.row, self.window, self.keep, self.layer, self.ops = shape, far, window, keep, layer, ops
        rank, depth = max(16, E // 32), layer / max(1, shape.layers - 1)
        channel = torch.arange(D) / max(1, D - 1)

        def every_head(x):  # (D) -> (Hs * D)
            return x.repeat(Hs)

        if far.inputs in ("conv", "conv_silu"):
            self.conv = nn.Parameter(F.pad(torch.ones((H + 2 * Hk) * D, 1), (CONV - 1, 0)))  # the last tap alone
        if far.inputs in SHIFTS:
            used = {"q": True, "k": True, "v": True, "decay": far.decay not in (*FIXED_DECAYS, "key"),
                    "write": far.write in ("exp", "beta", "rwkv7", "rad_rwkv7"), "gate": far.output_gate != "none"}
            streams = [name for name in used if used[name]]
            if far.inputs == "lerp":
                self.shift = nn.ParameterDict({name: torch.zeros(E) for name in streams})
            else:
                self.shift_all = nn.Parameter(torch.zeros(E))
                self.shift = nn.ModuleDict({name: LowRank(E, rank, E, act=torch.tanh) for name in streams})
        for name, heads in (("map_q", H), ("map_k", Hs)):
            if far.map in ("head", "head_bias", "half"):
                setattr(self, name, HeadLinear(heads, D, D // 2 if far.map == "half" else D, bias=far.map == "head_bias"))
            if far.map == "dense":
                setattr(self, name, nn.Linear(heads * D, heads * D))
                with torch.no_grad():
                    getattr(self, name).weight.copy_(torch.eye(heads * D))
                    getattr(self, name).bias.zero_()
        if far.map == "dct":
            self.register_buffer("dct", cosine_map(D), persistent=False)
        if far.decay == "softplus":  # A ~ U(1, 16), the step size log-uniform in [1e-3, 1e-1]
            self.log_A = nn.Parameter((1 + 15 * torch.rand(Hs)).log())
            self.dt = gate_of_zero(E, Hs, (math.log(1e-3) + math.log(100) * torch.rand(Hs)).exp().expm1().log())
        if far.decay == "sigmoid":
            self.decay = gate_of_zero(E, Hs, -torch.linspace(3, 6, Hs))
        if far.decay == "mlstm":
            self.forget_gate = gate_of_zero(E, Hs, torch.linspace(3, 6, Hs))
        if far.decay == "low_rank":
            self.decay = LowRank(E, 16, Hs * D)
        if far.decay in ("exp", "exp_floor"):
            self.decay = LowRank(E, rank, Hs * D, every_head(-6 + 5 * channel ** (0.7 + 1.3 * depth)), torch.tanh)
        if far.decay == "rwkv7":
            self.decay = LowRank(E, rank, Hs * D, every_head(-6.5 + 5 * channel ** (0.85 + depth**0.5)), torch.tanh)
        if far.write == "exp":
            self.input_gate = gate_of_zero(E, Hs, 0.0)
        if far.write == "beta":
            self.beta = gate_of_zero(E, Hs, 0.0)
        if far.write in ("rwkv7", "rad_rwkv7"):
            self.rate = LowRank(E, rank, Hs * D)
        if far.write == "rwkv7":
            self.k_k, self.k_a = nn.Parameter(torch.full((Hs, D), 0.85)), nn.Parameter(torch.ones(Hs, D))
        if far.value_residual and layer > 0:
            self.value_gate = LowRank(E, rank, Hk * D, -4.0)  # v stays the teacher's at first
        if far.extra == "skip":
            self.skip = nn.Parameter(torch.ones(H))
        if far.extra in ("bonus", "bonus7"):
            self.bonus = nn.Parameter(torch.zeros(Hs, D))
        if far.output_norm in ("layer", "rms", "rms_gated"):
            self.norm_weight = nn.Parameter(torch.ones(H, D))
        if far.output_norm == "layer":
            self.norm_bias = nn.Parameter(torch.zeros(H, D))
        if far.output_gate == "silu":
            self.output_gate = nn.Linear(E, H * D, bias=False)
        if far.output_gate == "sigmoid":
            self.output_gate = nn.Linear(E, H * D, bias=False)
            nn.init.zeros_(self.output_gate.weight)
        if far.output_gate == "silu_one":
            self.output_gate = gate_of_zero(E, H * D, 1.27846)
        if far.output_gate == "low_rank":  # about 1 at the start
            self.output_gate = LowRank(E, rank, H * D, act=torch.sigmoid)
            nn.init.constant_(self.output_gate.up, 2 / rank)

    def forward(self, x: Tensor, projected: tuple[Tensor, ...] | None, attention, context: Context, cache: dict[str, Tensor] | None):
        """x (B, T, E), the normalised block input, and its q, k, v if they are at hand -> numerator (B, T, H, D) and denominator
        (B, T, H, 1), in float32 at least; the denominator is None where the numerator is the answer. `attention` projects and
        normalises."""
        row, shape = self.row, self.shape
        xs, tail = self.shifted(x, context, cache)
        x_decay, x_write = xs.get("decay", x), xs.get("write", x)
        q, k, v = attention.project(*(xs[name] for name in "qkv")) if xs else projected
        k_raw = k
        if row.normed:
            q, k = attention.normalise(q, k)
        if row.inputs in ("conv", "conv_silu"):
            q, k, v, tail = self.convolve(q, k, v, context, cache)
        if row.value_residual:
            if self.layer == 0:
                context.first_v = v
            else:
                v = v + (context.first_v - v) * torch.sigmoid(self.value_gate(xs.get("v", x))).unflatten(-1, v.shape[-2:])
        if row.rotary == "before":
            q, k = rotate(q, context.rotary), rotate(k, context.rotary)
        if row.left:
            k, v = self.leaving(k, v, context, cache)
        if row.state_per == "query":
            k, v, k_raw = (y.repeat_interleave(shape.heads // shape.kv_heads, dim=2) for y in (k, v, k_raw))
        q, k = self.mapped(q, k, context)
        v = v.to(q.dtype)
        padded = None if context.position is None else context.position < 0
        if row.recurrence == "mlstm":
            o, state = self.mlstm(q, k, v, x_decay, x_write, padded, context, cache)
            den = None
        else:
            o, den, state, k = self.linear(q, k, v, k_raw, x_decay, x_write, padded, context, cache)
        if row.extra == "skip":
            o = o + self.skip[:, None] * v.repeat_interleave(o.shape[2] // v.shape[2], dim=2)
        if row.output_norm in ("group", "layer"):
            o = F.layer_norm(o, o.shape[-1:], eps=1e-5)
        elif row.output_norm == "rms":
            o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5)
        if row.output_norm in ("layer", "rms"):
            o = o * self.norm_weight
        if row.output_norm == "layer":
            o = o + self.norm_bias
        if row.extra == "bonus7":
            R = o.shape[2] // v.shape[2]
            now = (q.unflatten(2, (-1, R)) * (self.bonus * k)[:, :, :, None]).sum(-1, keepdim=True) * v[:, :, :, None]
            o = o + now.flatten(2, 3)
        if row.output_gate != "none":
            act = F.silu if row.output_gate in ("silu", "silu_one") else torch.sigmoid if row.output_gate == "sigmoid" else lambda y: y
            o = o * act(self.output_gate(xs.get("gate", x))).unflatten(-1, o.shape[-2:])
        if row.output_norm == "rms_gated":
            o = o * torch.rsqrt(o.square().mean((-2, -1), keepdim=True) + 1e-5) * self.norm_weight
        if cache is not None:
            for name, value in (state | tail).items():
                cache[name].copy_(value)
        return o, den

    def mlstm(self, q, k, v, x_decay, x_write, padded, context, cache):
        """(4)-(7); a padded step neither decays nor writes."""
        i, f = self.gates(x_write, x_decay)
        if padded is not None:
            i, f = i.masked_fill(padded[..., None], -math.inf), f.masked_fill(padded[..., None], math.inf)
        o, state = self.ops.mlstm(q, k, v, i, f, state=None if cache is None else (cache["C"], cache["n"], cache["m"]),
                                  segment=context.segment, normalizer=self.row.normalizer, scale=1.0)
        return o, dict(zip("Cnm", state))

    def gates(self, x_write, x_decay):
        """i and f of the mLSTM, (B, T, Hs) each; i is soft-capped, so that exp(i) stays in range."""
        return 15 * torch.tanh(self.input_gate(x_write) / 15), self.forget_gate(x_decay)

    def mapped(self, q, k, context):
        """q and k (its heads repeated already) as the state reads and writes them, in float32 at least."""
        q, k = self.features(q, "map_q"), self.features(k, "map_k")
        if self.row.rotary == "after":
            q, k = rotate(q, context.rotary), rotate(k, context.rotary)
        if self.row.scaled:
            q = q * self.shape.head_dim**-0.5
        dtype = torch.promote_types(q.dtype, torch.float32)
        return q.to(dtype), k.to(dtype)

    def linear(self, q, k, v, k_raw, x_decay, x_write, padded, context, cache):
        """(8) or (9): the gates, then the recurrence. The normaliser is one more column of the state. Also returns the k written."""
        row, b = self.row, None
        log_a = self.log_decay(x_decay, k_raw, k)
        if row.write == "dt":
            v = v * F.softplus(self.dt(x_decay).to(v.dtype))[..., None]
        if row.write == "keep_less":
            k = k * -torch.expm1(self.per_row(log_a))
        if row.write == "beta":
            beta = torch.sigmoid(self.beta(x_write).to(v.dtype))[..., None]
            b, c, k = -beta * k, (1 if log_a is None else self.per_row(log_a).exp()) * k, beta * k
        if row.write in ("rwkv7", "rad_rwkv7"):
            rate = torch.sigmoid(self.rate(x_write).to(v.dtype)).unflatten(-1, k.shape[-2:])
            c = F.normalize(k * self.k_k if row.write == "rwkv7" else k, dim=-1, eps=1e-6)
            b = -rate * c
            k = k * (1 + (rate - 1) * self.k_a if row.write == "rwkv7" else 1 - self.per_row(log_a).exp() + rate)
        if padded is not None:  # after the features, for phi(0) is not 0
            k = k.masked_fill(padded[..., None, None], 0)
            b = b if b is None else b.masked_fill(padded[..., None, None], 0)
            log_a = log_a if log_a is None else log_a.masked_fill(padded.reshape(*padded.shape, *[1] * (log_a.ndim - 2)), 0)
        if row.left:
            k = k.masked_fill((context.step < self.window + self.keep)[..., None, None], 0)
        divides = row.normalizer == "plain"
        if divides:
            v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        state = None if cache is None else torch.cat([cache["C"], cache["n"][..., None]], -1) if divides else cache["C"]
        if b is None:
            o, C = self.ops.scan(q, k, v, log_a, state=state, segment=context.segment, bonus=self.bonus if row.extra == "bonus" else None)
        else:
            o, C = self.ops.delta(q, k, v, log_a, b, c, state=state, segment=context.segment)
        if divides:
            return o[..., :-1], o[..., -1:], {"C": C[..., :-1], "n": C[..., -1]}, k
        return o, None, {"C": C}, k

    def log_decay(self, x, k_raw, k):
        """log a, (B, T, Hs) or per row of the state (B, T, Hs, D); None for no decay."""
        kind, dtype = self.row.decay, k.dtype
        if kind in FIXED_DECAYS:
            g = fixed_decay(kind, k.shape[2])
            return g if g is None else g.to(k.device, dtype).expand(k.shape[:3])
        if kind == "key":
            return F.logsigmoid(k_raw.to(dtype)) / 16
        if kind == "softplus":
            return -self.log_A.to(dtype).exp() * F.softplus(self.dt(x).to(dtype))
        y = self.decay(x).to(dtype)
        if kind == "sigmoid":
            return F.logsigmoid(-y)
        y = y.unflatten(-1, k.shape[-2:])
        if kind == "low_rank":
            return F.logsigmoid(y) / 16
        if kind == "rwkv7":
            return -math.exp(-0.5) * torch.sigmoid(y)
        return (-y.exp()).clamp(min=-5) if kind == "exp_floor" else -y.exp()

    @staticmethod
    def per_row(log_a):
        """log a with an axis that broadcasts against k (B, T, Hs, D)."""
        return log_a if log_a.ndim == 4 else log_a[..., None]

    def features(self, x, name):
        """phi(x) of x (B, T, heads, D); `name` is map_q or map_k."""
        if self.row.map == "dense":
            x = getattr(self, name)(x.flatten(2)).unflatten(-1, x.shape[-2:])
        elif self.row.map == "dct":
            x = x @ self.dct.to(x.dtype)
        elif self.row.map != "none":
            x = getattr(self, name)(x)
        return apply_features(x, self.row.features)

    def shifted(self, x, context, cache):
        """The token shift: by name, the mixes of x_t and x_{t-1} that it feeds ({} without one); and the tail for the cache."""
        if self.row.inputs not in SHIFTS:
            return {}, {}
        both, tail = self.extend(x, 1, "shift", context, cache)
        change = torch.where((context.step > 0)[..., None], both[:, :-1], 0) - x
        base = x + change * self.shift_all if self.row.inputs == "ddlerp" else None
        return {name: x + change * (mix if base is None else mix(base)) for name, mix in self.shift.items()}, tail

    def convolve(self, q, k, v, context, cache):
        """q, k, v through one causal depthwise convolution that does not cross documents; and the tail for the cache."""
        x = torch.cat([y.flatten(2) for y in (q, k, v)], -1)
        long, tail = self.extend(x, CONV - 1, "conv", context, cache)
        T = x.shape[1]
        taps = [torch.where((context.step >= d)[..., None], long[:, CONV - 1 - d : CONV - 1 - d + T], 0) * self.conv[:, CONV - 1 - d]
                for d in range(CONV)]
        y = sum(taps)
        y = F.silu(y) if self.row.inputs == "conv_silu" else y
        parts = y.split([z.shape[2] * z.shape[3] for z in (q, k, v)], -1)
        return *(part.unflatten(-1, z.shape[-2:]) for part, z in zip(parts, (q, k, v))), tail

    @staticmethod
    def extend(x, n, name, context, cache):
        """x (B, T, channels) behind the last n tokens before it (zeros if there are none); and the last n real ones after it."""
        if cache is None:
            return F.pad(x, (0, 0, n, 0)), {}
        long = torch.cat([cache[name].to(x.dtype), x], 1)
        index = context.length[:, None] + torch.arange(n, device=x.device)
        return long, {name: long.gather(1, index[..., None].expand(-1, -1, x.shape[2]))}

    def leaving(self, k, v, context, cache):
        """The keys and values that leave the window as each token enters: those of W steps before, from the ring or the piece."""
        B, T = context.step.shape
        if cache is None:
            return tuple(F.pad(y, (0, 0, 0, 0, self.window, 0))[:, :T] for y in (k, v))
        left, seen = context.step - self.window, context.step[:, :1]  # the first step's position: the tokens seen before
        slot = self.keep + (left - self.keep) % self.window
        index = torch.where(left < seen, slot, self.keep + self.window + left - seen)[..., None, None].expand(-1, -1, *k.shape[2:])
        return tuple(torch.cat([cache[name], y.to(cache[name].dtype)], 1).gather(1, index).to(y.dtype) for name, y in (("k", k), ("v", v)))


class Attention(nn.Module):
    """The one layer that executes any row of the table. `window` is W, solved from the budget."""

    def __init__(self, shape: Shape, row: Variant, window: int | None, ops=None, layer: int = 0):
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
            self.far = FarBranch(shape, row.far, window, row.keep, layer, self.ops)
        far = row.far or Far()
        self.fused = row.mix == "gate" and far.recurrence == "mlstm" and not far.value_residual and (  # one token is one op: `step`
            far.inputs, far.extra, far.output_norm, far.output_gate) == ("x", "none", "none", "none")
        if row.mix == "gate":
            self.mix_gate = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(H, 3 * D)),
                                              "bias": nn.Parameter(torch.zeros(H))})
        if row.mix in SHARED:
            self.gamma = nn.Parameter(torch.full((H,), math.log(0.1 / 0.9)))  # gamma = sigmoid(this) = 0.1

    def read(self, x: Tensor, context: Context, cache: dict[str, Tensor] | None = None) -> Tensor:
        """The layer's answer before W_o, (B, T, H, D), for x (B, T, E), the normalised block input.

        It is what stage I of the distillation matches; the block applies o_proj.

            mix 'gate'     o = g far + (1-g) near                                          (11)
            mix 'shared'   o = (gamma sum_s e^{a_s - c} v_s + C^T q) / (gamma sum_s e^{a_s - c} + n . q)      (12)

        In (12) s runs over the window, c is the greatest a_s (a learned sink counts) and scales the window alone: it is
        part of LoLCATs' definition, not a stabiliser.
        """
        row = self.row
        if self.fused and cache is not None and x.shape[1] == 1:
            return self.step(x, context, cache)
        projected = None if row.window is False and row.far.inputs in SHIFTS else self.project(x, x, x)
        if row.far:  # first: it reads the ring before the window writes it
            o, den = self.far(x, projected, self, context, cache)
            far = o if den is None or row.mix in SHARED else o / den.clamp(min=1e-6)  # ReLU's zeros: 0/0
            if row.window is False:
                return far.to(x.dtype)
        q, k, v = *self.normalise(*projected[:2]), projected[2]
        near, lse, peak = self.near(q, k, v, context, cache)
        if row.mix is None:
            return near
        if row.mix == "gate":
            g = self.gate(q, k, v)[..., None]
            return g * far.to(x.dtype) + (1 - g) * near                                    # (11)
        if row.mix == "half":
            return (far.to(x.dtype) + near) / 2
        gamma = torch.sigmoid(self.gamma)
        if row.learned_sink:
            lse, peak = torch.logaddexp(lse, self.sink.to(lse.dtype)), torch.maximum(peak, self.sink.to(peak.dtype))
        weight = (gamma * (lse - peak.masked_fill(peak == -math.inf, 0)).exp())[..., None]
        if row.mix == "shared_complement":
            far, den = far * (1 - gamma[:, None]), den * (1 - gamma[:, None])
        return ((weight * near + far) / (weight + den).clamp(min=torch.finfo(den.dtype).tiny)).to(x.dtype)    # (12)

    def step(self, x: Tensor, context: Context, cache: dict[str, Tensor]) -> Tensor:
        """`read` of one token of a gated window and mLSTM: all of it is one op."""
        far = self.far.row
        q, k, v = self.project(x, x, x)
        q, k = self.normalise(q, k)
        g, (i, f) = self.gate(q, k, v), self.far.gates(x, x)
        near = rotate(q, context.rotary), rotate(k, context.rotary)
        q_keep = rotate(q, context.rotary_keep) if context.rotary_keep else None
        if far.rotary == "before":
            q, k = near
        if far.state_per == "query":
            k = k.repeat_interleave(self.shape.heads // self.shape.kv_heads, dim=2)
        return self.ops.bifocal_step(*near, v, cache["k"], cache["v"], context.position[:, 0], *self.far.mapped(q, k, context), i, f,
                                     cache["C"], cache["n"], cache["m"], g, self.sink if self.row.learned_sink else None,
                                     keep=self.row.keep, q_keep=q_keep, normalizer=far.normalizer, scale=1.0)

    def project(self, x_q: Tensor, x_k: Tensor, x_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, T, H, D), k and v (B, T, Hk, D) of three inputs (B, T, E)."""
        return tuple(proj(x).unflatten(-1, (-1, self.shape.head_dim))
                     for proj, x in ((self.q_proj, x_q), (self.k_proj, x_k), (self.v_proj, x_v)))

    def normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k after the teacher's q/k norm, if it has one."""
        return (self.q_norm(q), self.k_norm(k)) if self.shape.qk_norm else (q, k)

    def near(self, q, k, v, context, cache):
        """The window and the sinks: o, and for (12) the log-sum-exp and the greatest score, else None. With a cache, keys and
        values are rounded to its dtype before any use, so that pieces of any size give the same answer."""
        row, sink = self.row, self.sink if self.row.learned_sink else None
        shared = row.mix in SHARED
        q_keep = rotate(q, context.rotary_keep) if context.rotary_keep else None
        q, k = rotate(q, context.rotary), rotate(k, context.rotary)
        if cache is None:
            o = self.ops.attend(q, k, v, sink, window=self.window, keep=row.keep, segment=context.segment, q_keep=q_keep,
                                return_peak=shared)
            return o if shared else (o, None, None)
        if q.shape[1] == 1 and not shared:
            o = self.ops.attend_step(q, k, v, cache["k"], cache["v"], context.position[:, 0], sink, keep=row.keep, q_keep=q_keep)
            return o, None, None
        k, v = k.to(cache["k"].dtype), v.to(cache["v"].dtype)
        rows, slots, steps = context.write
        if q.shape[1] == 1:  # one token: write it, then read the ring as it is
            cache["k"][rows, slots], cache["v"][rows, slots] = k[rows, steps], v[rows, steps]
            keys, values = cache["k"], cache["v"]
        else:  # a piece: early queries still need keys that late ones evict
            keys, values = torch.cat([cache["k"], k], 1), torch.cat([cache["v"], v], 1)
            cache["k"][rows, slots], cache["v"][rows, slots] = k[rows, steps], v[rows, steps]
        return attend_masked(q, keys.to(q.dtype), values.to(q.dtype), context.mask, sink, q_keep=q_keep, kept=context.kept)

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

    def __init__(self, shape: Shape, row: Variant, window: int | None, ops=None, layer: int = 0):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape, row, window, ops, layer)
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
        self.layers = nn.ModuleList(Block(shape, row, window, ops, l) for l in range(shape.layers))
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
        context = Context(rotary_table(step, D, theta, dtype), None, step, segment)
        N, W = self.row.keep, self.window
        if self.row.sink_positions == "in-cache" and N:
            context.rotary_keep = rotary_table(step.clamp(max=N + W - 1), D, theta, dtype)
        if cache is None:
            return context
        length = context.length = torch.full_like(cache.seen, T) if length is None else length
        context.position = torch.where(step < (cache.seen + length)[:, None], step, -1)
        if self.row.window is False:
            return context
        slots = cache.layers[0]["k"].shape[1] - N
        if self.row.window is None and int((cache.seen + length).max()) > slots:
            raise UserError(f"the cache of {self.row.name} has room for {slots} tokens, not for {int((cache.seen + length).max())}")
        if T == 1 and self.row.mix not in SHARED:  # `attend_step` needs no more, and asks nothing of the device
            return context
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

    @property
    def head_weight(self) -> Tensor:
        """(V, E): the embedding's own weight where the shape ties them."""
        return self.embed_tokens.weight if self.shape.tied else self.lm_head.weight

    def head(self, x: Tensor) -> Tensor:
        """hidden (..., E) -> logits (..., V)."""
        return F.linear(x, self.head_weight)

    def forward(self, tokens: Tensor, **kwargs) -> Tensor:
        """tokens (B, T) -> logits (B, T, V); the keyword arguments of `hidden`."""
        return self.head(self.hidden(tokens, **kwargs))


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


def sight(shape: Shape, row: Variant, budget: int, T: int) -> list[tuple[str, int, int]]:
    """What the last query of T tokens sees: ('exact' or 'summary', first, last + 1)."""
    window, parts = solve_window(shape, row, budget), []
    if row.window is not False:
        near = 0 if window is None else max(0, T - window)
        parts += [("exact", near, T)] + [("exact", 0, min(row.keep, near))] * (row.keep > 0)
    if row.far:
        parts += [("summary", 0, max(0, T - window) if row.far.left else T)]
    return parts


def explain(shape: Shape, row: Variant, budget: int) -> str:
    """The row in words, its equation, the tensors it holds and a picture of what a query sees."""
    window, far = solve_window(shape, row, budget), row.far
    near = {None: "every key", False: None, True: f"the last {window} tokens, the query's own included"}[row.window]
    lines = [f"{row.name}: {row.note}", ""]
    if near:
        sinks = [f"the first {row.keep} tokens ({WORDS['sink_positions'][row.sink_positions]})"] * (row.keep > 0)
        sinks += ["a learned sink logit in the softmax, its column dropped (3)"] * row.learned_sink
        lines += ["near  o_t = sum_s softmax_s(q_t . k_s / sqrt(D)) v_s over " + "; and ".join([near, *sinks])]
    if far:
        lines += [f"far   {WORDS['recurrence'][far.recurrence]}"]
        for field in dataclasses.fields(Far)[1:]:
            value = getattr(far, field.name)
            if isinstance(value, str) and (field.name == "state_per" or value != field.default):
                lines += [f"      {field.name}={value}: {WORDS[field.name][value]}"]
        lines += [f"      normed={far.normed}: q and k enter {'after' if far.normed else 'before'} the teacher's q/k norm"] * shape.qk_norm
        lines += ["      scaled: q times 1/sqrt(D)"] * far.scaled
        lines += ["      value_residual: v moves towards the first layer's v"] * far.value_residual
        lines += ["      left: a token is written when it leaves the window"] * far.left
    if row.mix:
        lines += [f"mix   {WORDS['mix'][row.mix]}"]
    lines += ["", f"what one layer holds for one sequence of {shape.name}" + ("" if window is None else f", budget {budget} tokens") + ":"]
    cache = layer_cache(shape, row, 1 if row.window is None else window, device="meta")
    for name, t in cache.items():
        size = "T x " if row.window is None else ""
        lines += [f"    {name:<6}{str(tuple(t.shape[1:])):<22}{str(t.dtype).removeprefix('torch.'):<10}{size}{t.nbytes:>11,} B"]
    if row.window is not None:
        lines += [f"    together {cache_bytes(cache):,} B = {cache_bytes(cache) / token_bytes(shape):.2f} tokens"]
    width, w = 60, 60 if row.window is None else 22
    gap = width - w
    exact = " " * width if not near else "#" * w if row.window is None else ("#" * 4 if row.keep else " " * 4) + " " * (gap - 4) + "#" * w
    lines += ["", "what a query at t sees:", "    token    0" + " " * (width - 2) + "t"]
    if near:
        lines += ["    exact    " + exact + ("" if row.window is None else f"   W = {window}" + (f", N = {row.keep}" if row.keep else ""))]
    if far:
        lines += ["    summary  " + ("~" * gap if far.left else "~" * width)]
    return "\n".join(lines)


def main() -> None:
    """Print the card of a shape and the memory table of every variant; the last line is the same as JSON."""
    parser = Parser(description="The memory table: what every variant keeps under one budget.")
    parser.add_argument("--shape", choices=PRESETS, default="qwen3-4b")
    parser.add_argument("--budget", type=int, help="tokens of memory a layer (default 576; 72 for mini)")
    parser.add_argument("--explain", metavar="VARIANT", help=f"one row in words: {' '.join(VARIANTS)}")
    args = parser.parse_args()
    shape = PRESETS[args.shape]
    budget = BUDGET.get(shape.name, 576) if args.budget is None else args.budget
    if budget < 1:
        raise UserError(f"--budget {budget}: must be at least 1 token")
    if args.explain:
        row = find_variant(args.explain)
        print(explain(shape, row, budget))
        print(json.dumps({"row": dataclasses.asdict(row)} | memory_row(shape, row, budget)))
        return
    with torch.device("meta"):  # blocks, final norm, embedding, head; drawing a meta embedding would load PyTorch's compiler
        block = sum(p.numel() for p in Block(shape, VARIANTS["full"], None).parameters())
    parameters = shape.layers * block + shape.width + shape.vocab * shape.width * (1 if shape.tied else 2)
    token = token_bytes(shape)
    card = {"shape": shape.name, "layers": shape.layers, "parameters": parameters, "budget": budget,
            "bytes_per_token_per_layer": token, "bytes_per_token": token * shape.layers,
            "budget_bytes_per_layer": token * budget, "budget_bytes": token * budget * shape.layers}
    print(f"{shape.name}: {shape.layers} layers, width {shape.width}, {shape.heads} query heads on {shape.kv_heads} "
          f"key/value heads of {shape.head_dim}, {parameters:,} parameters")
    print(f"one cached token: {token:,} B a layer, {card['bytes_per_token'] / 1024:g} KiB in all layers (bfloat16)")
    print(f"budget: {budget} tokens = {token * budget / 2**20:.4g} MiB a layer, {card['budget_bytes'] / 2**20:.4g} MiB a model\n")
    print(f"{'variant':<22}{'window':>8}{'sinks':>9}{'state':>16}{'B/layer':>12}{'nominal':>10}{'exact':>10}"
          f"{'MiB/model':>11}{'new params':>15}")
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
        print(f"{row.name:<22}{window:>8}{sinks:>9}{state:>16}{cells[0]:>12}{cells[1]:>10}"
              f"{cells[2]:>10}{cells[3]:>11}{r['parameters']:>15,}")
    print("\nnominal counts the matrix states alone, as [B] does; exact counts every byte (normaliser and stabiliser too).")
    print(json.dumps({"card": card, "variants": rows}))
    if misfits:
        least = max(least_budget(shape, row) for row in VARIANTS.values() if row.window is not None)
        raise UserError(f"{misfits[0]}; rows that do not fit: {len(misfits)}; from --budget {least} on every row does")


if __name__ == "__main__":
    cli(main)
