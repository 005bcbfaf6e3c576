"""reference.attend, forward and backward.

Of a query t whose document starts at st, with p = e^{a - lse}, share = sigmoid(lse - sink) and d for the gradient of the loss:

    s is kept     where  st <= s <= t  and  s < st + N,       scored with q_keep if there is one
    s is in reach where  st + N <= s <= t  and  s > t - W                                    (1)
    d p_ts = d o_t . v_s,   delta_t = share_t (d o_t . o_t) - d lse_t
    d a_ts = p_ts (share_t d p_ts - delta_t),  and d peak_t more at the first greatest score (2')
    d q_t = sum_s d a_ts k_s / sqrt(D),  k alike,  d v_s = sum_t share_t p_ts d o_t
    d sink = - sum_t sigmoid(sink - lse_t) (d o_t . o_t)                                     (3')

The two sets of keys are disjoint and in order, so each is a loop of its own, and the loop over the window needs no mask in its
middle. A key block's gradient sums the queries in reach. A kept key is seen by the whole document: cut the queries into chunks of L;
the chunk where its document starts is summed with the window, each later one by a program of its own into scratch.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference import _starts

from . import common
from .common import DIMS, DTYPES, dense, launch, strides

LOG2E = tl.constexpr(1 / math.log(2))
LN2 = tl.constexpr(math.log(2))
KEPT_BLOCK = 16  # kept keys a step: the smallest side of tl.dot
CHUNK = 512  # least L


def config(kernel: str, D: int, size: int, peak: bool = False) -> tuple[int, int, int, int]:
    """Queries a block, keys a block, warps and stages of a kernel by head dim, bytes of an element and whether the peak is asked for."""
    if size == 4:  # no tensor cores: float32 by fused multiply-adds
        M, C = {16: 64, 32: 64, 64: 32, 128: 32, 256: 16}[D], 32 if D <= 64 else 16
        return {"forward": (M, M, 4, 2), "dq": (C, C, 4, 1), "dkv": (C, C, 4, 1), "kept": (C, KEPT_BLOCK, 4, 1)}[kernel]
    if D <= 64:
        return {"forward": (128, 64, 8, 3), "dq": (64, 64, 4, 2), "dkv": (32, 64, 4, 2), "kept": (64, KEPT_BLOCK, 4, 2)}[kernel]
    if D == 128:
        return {"forward": (128, 64, 8, 2), "dq": (64, 64, 4, 2), "dkv": (32 if peak else 64, 64, 8, 2),
                "kept": (64, KEPT_BLOCK, 4, 2)}[kernel]
    return {"forward": (64, 32, 8, 2), "dq": (64, 32, 8, 2), "dkv": (32, 32, 8, 2), "kept": (32, KEPT_BLOCK, 4, 2)}[kernel]


# ----------------------------------------------------------------------------- parts of kernels


@triton.jit
def _rows(x, t0, end, stride, ROWS: tl.constexpr, D: tl.constexpr, ALL: tl.constexpr):
    """Rows t0 to t0 + ROWS of x, (ROWS, D); zeros from row `end` on, which ALL says is not there."""
    t = t0 + tl.arange(0, ROWS)
    at = x + t.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :]
    if ALL:
        return tl.load(at)
    else:
        return tl.load(at, mask=(t < end)[:, None], other=0.0)


@triton.jit
def _visible(t, s, st, W, N, KEPT: tl.constexpr):
    """(1): is the key s in reach of the query t, or kept for it?"""
    if KEPT:
        return (s <= t) & (s >= st) & (s < st + N)
    else:
        return (s <= t) & (s > t - W) & (s >= st + N)


@triton.jit
def _sigmoid(x):
    """1 / (1 + e^-x) without a positive exponent."""
    e = tl.exp2(-tl.abs(x) * LOG2E)
    return tl.where(x >= 0, 1.0, e) / (1 + e)


@triton.jit
def _share(lse, sink, h):
    """The factor of (3), 1 without a sink, 0 where lse = -inf."""
    if sink is None:
        return tl.where(lse == float("-inf"), 0.0, 1.0)
    else:
        seen = lse != float("-inf")
        return tl.where(seen, _sigmoid(tl.where(seen, lse, 0.0) - tl.load(sink + h)), 0.0)


@triton.jit
def _start(start, b, t, T):
    """Where the documents of the tokens t begin; without documents 0."""
    if start is None:
        return t * 0
    else:
        return tl.load(start + b * T + t, mask=t < T, other=0)


@triton.jit
def _end(end, b, t, T):
    """One past the last token of the document of t; without documents T."""
    if end is None:
        return t * 0 + T
    else:
        return tl.load(end + b * T + t)


@triton.jit
def _query_block(n, Hk, R):
    """Of this program: batch row, key/value head, query head and query block; the longest loops first, one group's heads together."""
    pid = tl.program_id(0)
    h = pid // (R * n) % Hk
    return (pid // (R * n) // Hk).to(tl.int64), h.to(tl.int64), (h * R + pid % R).to(tl.int64), n - 1 - pid // R % n


@triton.jit
def _key_ranges(a, b, first, last, W, N, BN: tl.constexpr):
    """Keys that the queries a to b reach: a masked edge lo to m1, m1 to m2 that all of them see, a masked edge m2 to b.

    first, last: where the documents of the queries a and b - 1 begin.
    """
    lo = tl.maximum(first + N, a - W + 1)
    m1 = lo + (tl.maximum(tl.maximum(last + N, b - W) - lo, 0) + BN - 1) // BN * BN
    return lo, m1, m1 + tl.maximum(a + 1 - m1, 0) // BN * BN


# ----------------------------------------------------------------------------- forward


@triton.jit
def _forward_keys(acc, l, m, top, q, k, v, k_stride, v_stride, t, st, lo, hi, W, N, c,
                  BN: tl.constexpr, D: tl.constexpr, ALL: tl.constexpr, KEPT: tl.constexpr, PEAK: tl.constexpr):
    """The online softmax over the keys lo to hi: acc = sum 2^(x - m) v, l = sum 2^(x - m), m = max x, x = a log2(e)."""
    for s0 in range(lo, hi, BN):
        s = s0 + tl.arange(0, BN)
        keys = _rows(k, s0, hi, k_stride, BN, D, ALL)
        x = tl.dot(q, tl.trans(keys), input_precision="ieee") * c                            # (2)
        if not ALL:
            x = tl.where(_visible(t[:, None], s[None, :], st[:, None], W, N, KEPT) & (s < hi)[None, :], x, float("-inf"))
        if PEAK:
            greatest, index = tl.max(x, 1, return_indices=True)
            top = tl.where(greatest > m, s0 + index, top)
        else:
            greatest = tl.max(x, 1)
        new = tl.maximum(m, greatest)
        shift = new if ALL else tl.where(new == float("-inf"), 0.0, new)
        p, decay = tl.exp2(x - shift[:, None]), tl.exp2(m - shift)
        values = _rows(v, s0, hi, v_stride, BN, D, ALL)
        l = l * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
        m = new
    return acc, l, m, top


@triton.jit(do_not_specialize=["T", "W", "N"])
def _forward(q, q_keep, k, v, sink, start, o, lse, peak, top, q_strides, keep_strides, k_strides, v_strides, T, Hk, R, W, N, scale,
             D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KEEP: tl.constexpr):
    """(1), (2), (3) of a block of queries of one head: o, lse, the greatest score and its key."""
    batch, h, head, i = _query_block(tl.cdiv(T, BM), Hk, R)
    a = i * BM
    b = tl.minimum(a + BM, T)
    t = a + tl.arange(0, BM)
    st, first, last = _start(start, batch, t, T), _start(start, batch, a, T), _start(start, batch, b - 1, T)
    q += batch * q_strides[0] + head * q_strides[2]
    k += batch * k_strides[0] + h * k_strides[2]
    v += batch * v_strides[0] + h * v_strides[2]
    acc, l, m = tl.zeros([BM, D], tl.float32), tl.zeros([BM], tl.float32), tl.full([BM], float("-inf"), tl.float32)
    best = tl.full([BM], -1, tl.int32)
    c = scale * LOG2E
    PEAK: tl.constexpr = peak is not None
    if KEEP:  # of the first query's document, then of those that begin in this block
        if q_keep is None:
            x = _rows(q, a, b, q_strides[1], BM, D, False)
        else:
            x = _rows(q_keep + batch * keep_strides[0] + head * keep_strides[2], a, b, keep_strides[1], BM, D, False)
        e = tl.minimum(first + N, b)
        acc, l, m, best = _forward_keys(acc, l, m, best, x, k, v, k_strides[1], v_strides[1], t, st, first, e, W, N, c,
                                        BK, D, False, True, PEAK)
        if start is not None:
            lo = tl.where(last > first, tl.maximum(e, a), b)
            acc, l, m, best = _forward_keys(acc, l, m, best, x, k, v, k_strides[1], v_strides[1], t, st, lo, b, W, N, c,
                                            BK, D, False, True, PEAK)
    x = _rows(q, a, b, q_strides[1], BM, D, False)
    lo, m1, m2 = _key_ranges(a, b, first, last, W, N, BN)
    acc, l, m, best = _forward_keys(acc, l, m, best, x, k, v, k_strides[1], v_strides[1], t, st, lo, tl.minimum(m1, b), W, N, c,
                                    BN, D, False, False, PEAK)
    acc, l, m, best = _forward_keys(acc, l, m, best, x, k, v, k_strides[1], v_strides[1], t, st, m1, m2, W, N, c,
                                    BN, D, True, False, PEAK)
    acc, l, m, best = _forward_keys(acc, l, m, best, x, k, v, k_strides[1], v_strides[1], t, st, m2, b, W, N, c,
                                    BN, D, False, False, PEAK)
    sees = l != 0
    l = tl.where(sees, l, 1.0)
    total = tl.where(sees, (m + tl.log2(l)) * LN2, float("-inf"))                            # (2)
    acc = acc / l[:, None]
    if sink is not None:
        acc = acc * _share(total, sink, head)[:, None]                                       # (3)
    H = Hk * R
    at = (batch * H + head) * T + t
    tl.store(lse + at, total, mask=t < T)
    if PEAK:
        tl.store(peak + at, m * LN2, mask=t < T)
        tl.store(top + at, best, mask=t < T)
    at = ((batch * T + t) * H + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(o + at, acc.to(o.dtype.element_ty), mask=(t < T)[:, None])


# ----------------------------------------------------------------------------- backward


@triton.jit(do_not_specialize=["T"])
def _delta(o, do, lse, dlse, sink, delta, dsink, do_strides, T, Hk, R, D: tl.constexpr, BM: tl.constexpr):
    """delta of (2') and the block's part of (3')."""
    n = tl.cdiv(T, BM)
    batch, h, head, i = _query_block(n, Hk, R)
    t = i * BM + tl.arange(0, BM)
    row = batch * Hk * R + head
    x = _rows(do + batch * do_strides[0] + head * do_strides[2], i * BM, T, do_strides[1], BM, D, False).to(tl.float32)
    y = _rows(o + (batch * T * Hk * R + head) * D, i * BM, T, Hk * R * D, BM, D, False).to(tl.float32)
    total = tl.load(lse + row * T + t, mask=t < T, other=float("-inf"))
    d = tl.sum(x * y, 1)
    if sink is not None:
        sees = total != float("-inf")
        dropped = tl.where(sees, _sigmoid(tl.load(sink + head) - tl.where(sees, total, 0.0)), 0.0)
        tl.store(dsink + row * n + i, -tl.sum(dropped * d, 0))                               # (3')
    d = d * _share(total, sink, head)
    if dlse is not None:
        d -= tl.load(dlse + row * T + t, mask=t < T, other=0.0)
    tl.store(delta + row * T + t, d, mask=t < T)


@triton.jit
def _dq_keys(dq, q, do, k, v, k_stride, v_stride, t, st, total, share, delta, top, dpeak, lo, hi, W, N, c,
             BN: tl.constexpr, D: tl.constexpr, ALL: tl.constexpr, KEPT: tl.constexpr, SINK: tl.constexpr, PEAK: tl.constexpr):
    """dq += sum of d a_ts k_s over the keys lo to hi."""
    for s0 in range(lo, hi, BN):
        s = s0 + tl.arange(0, BN)
        keys, values = _rows(k, s0, hi, k_stride, BN, D, ALL), _rows(v, s0, hi, v_stride, BN, D, ALL)
        x = tl.dot(q, tl.trans(keys), input_precision="ieee") * c - total[:, None]
        if not ALL:
            x = tl.where(_visible(t[:, None], s[None, :], st[:, None], W, N, KEPT) & (s < hi)[None, :], x, float("-inf"))
        p = tl.exp2(x)
        dp = tl.dot(do, tl.trans(values), input_precision="ieee")
        if SINK:
            dp = dp * share[:, None]
        da = p * (dp - delta[:, None])                                                       # (2')
        if PEAK:
            da += tl.where(s[None, :] == top[:, None], dpeak[:, None], 0.0)
        da = tl.where(p == 0, 0.0, da)  # another loop's pair; a masked d p may be infinite
        dq = tl.dot(da.to(keys.dtype), keys, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["T", "W", "N"])
def _dq(q, q_keep, k, v, do, sink, start, lse, delta, top, dpeak, dq, dq_keep, q_strides, keep_strides, k_strides, v_strides, do_strides,
        T, Hk, R, W, N, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KEEP: tl.constexpr):
    """d q, and d q_keep, of a block of queries of one head."""
    batch, h, head, i = _query_block(tl.cdiv(T, BM), Hk, R)
    a = i * BM
    b = tl.minimum(a + BM, T)
    t = a + tl.arange(0, BM)
    st, first, last = _start(start, batch, t, T), _start(start, batch, a, T), _start(start, batch, b - 1, T)
    q += batch * q_strides[0] + head * q_strides[2]
    k += batch * k_strides[0] + h * k_strides[2]
    v += batch * v_strides[0] + h * v_strides[2]
    H = Hk * R
    at = (batch * H + head) * T + t
    total = tl.load(lse + at, mask=t < T, other=0.0)
    d = tl.load(delta + at, mask=t < T, other=0.0)
    share = _share(total, sink, head)
    total = tl.where(total == float("-inf"), 0.0, total) * LOG2E
    SINK: tl.constexpr = sink is not None
    PEAK: tl.constexpr = dpeak is not None
    index, dx = t, total  # not read without a peak
    if PEAK:
        index, dx = tl.load(top + at, mask=t < T, other=-1), tl.load(dpeak + at, mask=t < T, other=0.0)
    y = _rows(do + batch * do_strides[0] + head * do_strides[2], a, b, do_strides[1], BM, D, False)
    c = scale * LOG2E
    at = ((batch * T + t) * H + head)[:, None] * D + tl.arange(0, D)[None, :]
    acc = tl.zeros([BM, D], tl.float32)
    if KEEP:
        if q_keep is None:
            x = _rows(q, a, b, q_strides[1], BM, D, False)
        else:
            x = _rows(q_keep + batch * keep_strides[0] + head * keep_strides[2], a, b, keep_strides[1], BM, D, False)
        e = tl.minimum(first + N, b)
        acc = _dq_keys(acc, x, y, k, v, k_strides[1], v_strides[1], t, st, total, share, d, index, dx, first, e, W, N, c,
                       BK, D, False, True, SINK, PEAK)
        if start is not None:
            lo = tl.where(last > first, tl.maximum(e, a), b)
            acc = _dq_keys(acc, x, y, k, v, k_strides[1], v_strides[1], t, st, total, share, d, index, dx, lo, b, W, N, c,
                           BK, D, False, True, SINK, PEAK)
    if q_keep is not None:
        tl.store(dq_keep + at, (acc * scale).to(dq_keep.dtype.element_ty), mask=(t < T)[:, None])
        acc = tl.zeros([BM, D], tl.float32)
    x = _rows(q, a, b, q_strides[1], BM, D, False)
    lo, m1, m2 = _key_ranges(a, b, first, last, W, N, BN)
    acc = _dq_keys(acc, x, y, k, v, k_strides[1], v_strides[1], t, st, total, share, d, index, dx, lo, tl.minimum(m1, b), W, N, c,
                   BN, D, False, False, SINK, PEAK)
    acc = _dq_keys(acc, x, y, k, v, k_strides[1], v_strides[1], t, st, total, share, d, index, dx, m1, m2, W, N, c,
                   BN, D, True, False, SINK, PEAK)
    acc = _dq_keys(acc, x, y, k, v, k_strides[1], v_strides[1], t, st, total, share, d, index, dx, m2, b, W, N, c,
                   BN, D, False, False, SINK, PEAK)
    tl.store(dq + at, (acc * scale).to(dq.dtype.element_ty), mask=(t < T)[:, None])


@triton.jit
def _dkv_queries(dk, dv, keys, values, q, do, lse, delta, top, dpeak, sink, start, batch, h, Hk, R, q_strides, do_strides,
                 s, lo, hi, m1, m2, after, T, W, N, c, BM: tl.constexpr, D: tl.constexpr, KEPT: tl.constexpr):
    """dk += sum of d a_ts q_t and dv += sum of share p_ts d o_t over the queries lo to hi of the group's heads; m1 to m2 see all
    the keys. KEPT: queries whose document begins at `after` or later."""
    n = tl.cdiv(tl.maximum(hi - lo, 0), BM)
    for j in range(0, R * n):
        head, t0 = h * R + j // n, lo + j % n * BM
        t = t0 + tl.arange(0, BM)
        here = t < hi
        x = _rows(q + head * q_strides[2], t0, hi, q_strides[1], BM, D, False)
        y = _rows(do + head * do_strides[2], t0, hi, do_strides[1], BM, D, False)
        at = (batch * Hk * R + head) * T + t
        total, d = tl.load(lse + at, mask=here, other=0.0), tl.load(delta + at, mask=here, other=0.0)
        shift = tl.where(total == float("-inf"), 0.0, total) * LOG2E
        a = tl.dot(keys, tl.trans(x), input_precision="ieee") * c - shift[None, :]           # (BN, BM)
        if (t0 < m1) | (t0 + BM > m2):
            st = _start(start, batch, t, T)
            seen = _visible(t[None, :], s[:, None], st[None, :], W, N, KEPT) & here[None, :]
            if KEPT:
                seen = seen & (st >= after)[None, :]
            a = tl.where(seen, a, float("-inf"))
        p = tl.exp2(a)
        dp = tl.dot(values, tl.trans(y), input_precision="ieee")
        if sink is None:
            dv = tl.dot(p.to(y.dtype), y, dv, input_precision="ieee")
        else:
            share = _share(total, sink, head)
            dp = dp * share[None, :]
            dv = tl.dot((p * share[None, :]).to(y.dtype), y, dv, input_precision="ieee")
        da = p * (dp - d[None, :])                                                           # (2')
        if dpeak is not None:
            first = tl.load(top + at, mask=here, other=-1)
            da += tl.where(s[:, None] == first[None, :], tl.load(dpeak + at, mask=here, other=0.0)[None, :], 0.0)
        da = tl.where(p == 0, 0.0, da)  # another loop's pair; a masked d p may be infinite
        dk = tl.dot(da.to(x.dtype), x, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["T", "W", "N", "L"])
def _kept(q, k, v, do, sink, start, end, lse, delta, top, dpeak, dk, dv, q_strides, k_strides, v_strides, do_strides,
          T, Hk, R, N, L, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """d k and d v of kept keys from one chunk of queries of the document that runs into it: float32 sums for the scratch
    dk, dv (B, Hk, chunks, N, D), d k not yet scaled."""
    n, chunks, pid = tl.cdiv(N, BN), tl.cdiv(T, L), tl.program_id(0)
    j = pid % n * BN
    chunk = pid // n % chunks
    h, batch = (pid // n // chunks % Hk).to(tl.int64), (pid // n // chunks // Hk).to(tl.int64)
    a = chunk * L
    first = _start(start, batch, a, T)
    hi = tl.where(first < a, tl.minimum(a + L, _end(end, batch, a, T)), 0)
    s = first + j + tl.arange(0, BN)
    k += batch * k_strides[0] + h * k_strides[2]
    v += batch * v_strides[0] + h * v_strides[2]
    keys, values = _rows(k, first + j, hi, k_strides[1], BN, D, False), _rows(v, first + j, hi, v_strides[1], BN, D, False)
    x, y = tl.zeros([BN, D], tl.float32), tl.zeros([BN, D], tl.float32)
    x, y = _dkv_queries(x, y, keys, values, q + batch * q_strides[0], do + batch * do_strides[0], lse, delta, top, dpeak, sink, start,
                        batch, h, Hk, R, q_strides, do_strides, s, tl.maximum(a, first + j), hi, hi, hi, 0, T, T, N, scale * LOG2E,
                        BM, D, True)
    j += tl.arange(0, BN)
    at = (((batch * Hk + h) * chunks + chunk) * N + j)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dk + at, x, mask=(j < N)[:, None])
    tl.store(dv + at, y, mask=(j < N)[:, None])


@triton.jit(do_not_specialize=["T", "W", "N", "L"])
def _dkv(q, q_keep, k, v, do, sink, start, end, lse, delta, top, dpeak, kept_dk, kept_dv, dk, dv,
         q_strides, keep_strides, k_strides, v_strides, do_strides, T, Hk, R, W, N, L, scale,
         D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, KEEP: tl.constexpr):
    """d k and d v of a block of keys of one key/value head: all query heads of its group, all queries in reach, and for kept keys
    those of the chunk; later chunks come from the scratch of `_kept`."""
    pid, n = tl.program_id(0), tl.cdiv(T, BN)
    s0 = pid % n * BN
    h, batch = (pid // n % Hk).to(tl.int64), (pid // n // Hk).to(tl.int64)
    s = s0 + tl.arange(0, BN)
    k += batch * k_strides[0] + h * k_strides[2]
    v += batch * v_strides[0] + h * v_strides[2]
    keys, values = _rows(k, s0, T, k_strides[1], BN, D, False), _rows(v, s0, T, v_strides[1], BN, D, False)
    x, y = tl.zeros([BN, D], tl.float32), tl.zeros([BN, D], tl.float32)
    c = scale * LOG2E
    first, stop = _start(start, batch, s0, T), _end(end, batch, tl.minimum(s0 + BN, T) - 1, T)
    hi = tl.minimum(s0 + BN - 1 + W, stop)
    limit = tl.minimum(s0 + W, _end(end, batch, s0, T))  # up to here every query of s0's document sees all keys from s0 on
    if KEEP:
        limit = tl.where(s0 < first + N, 0, limit)
        own = _start(start, batch, s, T)
        kept = (s < own + N) & (s < T)
        after = s0 // L * L
        kept_hi = tl.where(tl.max((kept & (own >= after)).to(tl.int32), 0) > 0, tl.minimum(after + L, stop), 0)
    q += batch * q_strides[0]
    do += batch * do_strides[0]
    x, y = _dkv_queries(x, y, keys, values, q, do, lse, delta, top, dpeak, sink, start, batch, h, Hk, R, q_strides, do_strides,
                        s, s0, hi, s0 + BN - 1, limit, 0, T, W, N, c, BM, D, False)
    if KEEP:
        if q_keep is None:
            x, y = _dkv_queries(x, y, keys, values, q, do, lse, delta, top, dpeak, sink, start, batch, h, Hk, R, q_strides, do_strides,
                                s, s0, kept_hi, T, 0, after, T, W, N, c, BM, D, True)
        else:
            x, y = _dkv_queries(x, y, keys, values, q_keep + batch * keep_strides[0], do, lse, delta, top, dpeak, sink, start,
                                batch, h, Hk, R, keep_strides, do_strides, s, s0, kept_hi, T, 0, after, T, W, N, c, BM, D, True)
    if kept_dk is not None:
        chunks = tl.cdiv(T, L)
        far = tl.where(tl.max(kept.to(tl.int32), 0) > 0, tl.cdiv(stop, L), 0)
        for chunk in range(s0 // L, far):
            # a document that begins with the chunk is already in x and y, and 0 in the scratch
            from_here = kept & (_start(start, batch, s * 0 + chunk * L, T) == own)
            at = (((batch * Hk + h) * chunks + chunk) * N + s - own)[:, None] * D + tl.arange(0, D)[None, :]
            x += tl.load(kept_dk + at, mask=from_here[:, None], other=0.0)
            y += tl.load(kept_dv + at, mask=from_here[:, None], other=0.0)
    at = ((batch * T + s) * Hk + h)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dk + at, (x * scale).to(dk.dtype.element_ty), mask=(s < T)[:, None])
    tl.store(dv + at, y.to(dv.dtype.element_ty), mask=(s < T)[:, None])


# ----------------------------------------------------------------------------- autograd


def _by_head(x: Tensor | None) -> Tensor | None:
    """(B, T, H) -> (B, H, T), contiguous."""
    return None if x is None else x.float().transpose(1, 2).contiguous()


class _Attend(torch.autograd.Function):
    """Kept from the forward pass: the inputs, o, lse, and for the peak's gradient the key of the greatest score."""

    @staticmethod
    def forward(ctx, q, k, v, sink, q_keep, start, end, W, N, want_peak):
        (B, T, H, D), Hk = q.shape, k.shape[2]
        ctx.set_materialize_grads(False)
        o, lse, peak, top = common.empty((B, T, H, D), q.dtype, q.device), common.empty((B, H, T), torch.float32, q.device), None, None
        if want_peak:
            peak, top = common.empty((B, H, T), torch.float32, q.device), common.empty((B, H, T), torch.int32, q.device)
        M, BN, warps, stages = config("forward", D, q.element_size(), want_peak)
        with torch.cuda.device_of(q):
            launch(_forward, triton.cdiv(T, M) * B * H, q, q_keep, k, v, sink, start, o, lse, peak, top, strides(q), strides(q_keep),
                    strides(k), strides(v), T, Hk, H // Hk, W, N, D**-0.5, D, M, BN, KEPT_BLOCK, N > 0,
                    num_warps=warps, num_stages=stages)
        ctx.save_for_backward(q, k, v, sink, q_keep, start, end, o, lse, top)
        ctx.rest = W, N
        return o, lse.transpose(1, 2), peak if peak is None else peak.transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dlse, dpeak):
        q, k, v, sink, q_keep, start, end, o, lse, top = ctx.saved_tensors
        (B, T, H, D), Hk, (W, N) = q.shape, k.shape[2], ctx.rest
        R, scale, device, size = H // Hk, D**-0.5, q.device, q.element_size()
        do = torch.zeros_like(o) if do is None else dense(do)
        dlse, dpeak = _by_head(dlse), _by_head(dpeak)
        delta, dq = common.empty((B, H, T), torch.float32, device), common.empty((B, T, H, D), q.dtype, device)
        dk, dv = (common.empty((B, T, Hk, D), q.dtype, device) for _ in range(2))
        dq_keep = None if q_keep is None else common.empty((B, T, H, D), q.dtype, device)
        n = triton.cdiv(T, 64)
        dsink = None if sink is None else common.empty((B, H, n), torch.float32, device)
        all_strides = *map(strides, (q, q_keep, k, v, do)),
        with torch.cuda.device_of(q):
            launch(_delta, n * B * H, o, do, lse, dlse, sink, delta, dsink, strides(do), T, Hk, R, D, 64, num_warps=4)
            M, BN, warps, stages = config("dq", D, size, dpeak is not None)
            launch(_dq, triton.cdiv(T, M) * B * H, q, q_keep, k, v, do, sink, start, lse, delta, top, dpeak, dq, dq_keep, *all_strides,
                    T, Hk, R, W, N, scale, D, M, BN, KEPT_BLOCK, N > 0, num_warps=warps, num_stages=stages)
            M, BN, warps, stages = config("kept", D, size, dpeak is not None)
            L = chunk_length(T, N)
            chunks = triton.cdiv(T, L)
            kept_dk = kept_dv = None
            if N and chunks > 1:
                kept_dk, kept_dv = (common.empty((B, Hk, chunks, N, D), torch.float32, device) for _ in range(2))
                x = q if q_keep is None else q_keep
                launch(_kept, triton.cdiv(N, BN) * chunks * B * Hk, x, k, v, do, sink, start, end, lse, delta, top, dpeak,
                        kept_dk, kept_dv, strides(x), *all_strides[2:], T, Hk, R, N, L, scale, D, M, BN,
                        num_warps=warps, num_stages=stages)
            M, BN, warps, stages = config("dkv", D, size, dpeak is not None)
            launch(_dkv, triton.cdiv(T, BN) * B * Hk, q, q_keep, k, v, do, sink, start, end, lse, delta, top, dpeak, kept_dk, kept_dv,
                    dk, dv, *all_strides, T, Hk, R, W, N, L, scale, D, M, BN, N > 0, num_warps=warps, num_stages=stages)
        return dq, dk, dv, None if sink is None else dsink.sum((0, 2)), dq_keep, None, None, None, None, None


def chunk_length(T: int, N: int) -> int:
    """L: at most 128 chunks, fewer where N is large, and a multiple of every key block."""
    return triton.cdiv(max(CHUNK, triton.cdiv(T, max(1, min(128, 2**16 // max(N, 1))))), 128) * 128


def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, *, window: int | None = None, keep: int = 0,
           segment: Tensor | None = None, q_keep: Tensor | None = None, return_lse: bool = False, return_peak: bool = False):
    """reference.attend on CUDA, or anywhere under TRITON_INTERPRET=1.

    q, q_keep (B, T, H, D); k, v (B, T, Hk, D) of the same dtype, float32, float16 or bfloat16; sink (H); segment (B, T).
    Returns o (B, T, H, D) in that dtype, lse and the greatest score (B, T, H) in float32. All float inputs have gradients.
    Raises ValueError for what the kernels do not do.
    """
    check(q, k, v, sink, segment, q_keep)
    T = q.shape[1]
    N = max(0, min(keep, T))
    W = T if window is None or N == T else max(0, min(window, T))
    if W == T and q_keep is None:  # every key of the document is in reach
        N = 0
    start = end = None
    if segment is not None and T:
        index, begins = torch.arange(T, dtype=torch.int32, device=q.device), _starts(segment)
        start = torch.where(begins, index, 0).cummax(1).values.contiguous()
        end = torch.where(begins, index, T).roll(-1, 1)
        end[:, -1] = T
        end = end.flip(1).cummin(1).values.flip(1).contiguous()
    q, k, v, q_keep = map(dense, (q, k, v, q_keep))
    o, lse, peak = _Attend.apply(q, k, v, None if sink is None else sink.float().contiguous(), q_keep, start, end, W, N, return_peak)
    return (o, lse, peak) if return_peak else (o, lse) if return_lse else o


def check(q, k, v, sink, segment, q_keep):
    """ValueError, one line by name, for what `attend` does not do."""
    def need(holds, message):
        common.need("attend", holds, message)

    need(q.ndim == 4 and k.ndim == 4, f"q {tuple(q.shape)} and k {tuple(k.shape)} must be (batch, time, heads, head dim)")
    B, T, H, D = q.shape
    Hk = k.shape[2]
    need(D in DIMS, f"head dim {D}: 16, 32, 64, 128 or 256")
    need(q.dtype in DTYPES, f"{q.dtype}: float32, float16 or bfloat16")
    need(k.shape == (B, T, Hk, D), f"k {tuple(k.shape)} must be {(B, T, Hk, D)}, as many steps and channels as q")
    need(v.shape == k.shape, f"v {tuple(v.shape)} must be k's {tuple(k.shape)}")
    need(Hk and H % Hk == 0, f"{H} query heads are no multiple of {Hk} key/value heads")
    need(q_keep is None or q_keep.shape == q.shape, "q_keep must have q's shape")
    need(sink is None or sink.shape == (H,), f"sink must be ({H},), a logit per query head")
    need(segment is None or segment.shape == (B, T), f"segment must be {(B, T)}")
    for name, x in dict(k=k, v=v, q_keep=q_keep).items():
        need(x is None or x.dtype == q.dtype, f"{name} is {x is not None and x.dtype}, q is {q.dtype}: one dtype for all")
    common.need_device("attend", q, k=k, v=v, q_keep=q_keep, sink=sink, segment=segment)


# ----------------------------------------------------------------------------- machine code without a GPU

KERNELS = {"attend": _forward, "attend delta": _delta, "attend dq": _dq, "attend kept": _kept, "attend dkv": _dkv}
FORWARD = ("attend",)
OPTIONS = {"plain": "", "sink": "sink", "keep": "keep", "packed": "sink start end", "packed keep": "keep sink start end",
           "in-cache": "keep q_keep dq_keep sink", "all": "keep q_keep dq_keep sink start end dlse dsink peak top dpeak"}


def launches(D: int, dtype: str):
    """Every way `attend` launches a kernel at head dim D, for common.usage: (name, options, kernel, types, constants, warps, stages)."""
    optional = {"q_keep", "sink", "start", "end", "dlse", "dsink", "peak", "top", "dpeak", "dq_keep", "kept_dk", "kept_dv"}
    for name, kernel in KERNELS.items():
        part = name.removeprefix("attend").strip() or "forward"
        for options, words in OPTIONS.items():
            on = {*words.split()} | ({"kept_dk", "kept_dv"} if "keep" in words.split() else set())
            if part == "kept" and "keep" not in on or part == "delta" and options not in ("plain", "all"):
                continue
            M, BN, warps, stages = (64, 0, 4, 3) if part == "delta" else config(part, D, 4 if dtype == "fp32" else 2, "peak" in on)
            constants = {"D": D, "BM": M, "BN": BN, "BK": KEPT_BLOCK, "KEEP": "keep" in on} | dict.fromkeys(optional - on)
            types = dict.fromkeys(("q", "q_keep", "k", "v", "o", "do", "dq", "dq_keep", "dk", "dv"), "*" + dtype)
            types |= dict.fromkeys(("sink", "lse", "peak", "delta", "dlse", "dpeak", "dsink", "kept_dk", "kept_dv"), "*fp32")
            types |= dict.fromkeys(("start", "end", "top"), "*i32") | dict.fromkeys(("T", "Hk", "R", "W", "N", "L"), "i32")
            types |= {"scale": "fp32"} | {x + "_strides": "strides" for x in ("q", "keep", "k", "v", "do")}
            if part == "kept":
                types |= {"dk": "*fp32", "dv": "*fp32"}
            yield name, options, kernel, types, {x: constants[x] for x in kernel.arg_names if x in constants}, warps, stages
