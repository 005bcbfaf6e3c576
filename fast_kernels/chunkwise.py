"""reference.mlstm, and reference.scan with a decay per head or none: chunks of L steps, forward and backward.

With F_t the sum of the log decays from the chunk's start, or from the document's if it began inside, and x_ts = sum of log f_u over
s < u <= t, plus i_s (added up as it is: no difference of two sums, which a strong decay would swallow):

    m_t = max(F_t + m_0, max_{s<=t} x_ts)                                                   (4')
    e_ts = e^{x_ts - m_t},   c_t = e^{F_t + m_0 - m_t}, 0 where the document began inside the chunk
    num_t = sum_s e_ts (q_t.k_s) v_s + c_t C_0^T q_t,   den_t alike with 1 and n_0,   o_t = num_t / (7)     (6')
    C_L = c_L C_0 + sum_s e_Ls k_s v_s^T,   n_L alike

`scan` is this with i = m = 0 and without a denominator. The backward pass is (7') of fast.py:

    d s_ts = d num_t . v_s + d den_t,   d q_t = sum_s d s_ts e_ts k_s + c_t (C_0 d num_t + d den_t n_0)     (7')
    d k_s = sum_t d s_ts e_ts q_t + e_Ls (dC_L v_s + dn_L),   d v_s = sum_t s_ts d num_t + e_Ls dC_L^T k_s
    dC_0 = c_L dC_L + sum_t c_t q_t d num_t^T,   d log e_ts = d s_ts s_ts

    _gates      parallel over chunks: F, max_s x_ts and the row x_Ls
    _maxima     a scan over chunks: m at every chunk's start
    _states     chunk after chunk, a tile of C: the state before every chunk
    _outputs    parallel over chunks and query heads: o
    _dstates    chunk after chunk backwards, a tile of C: the gradient of the state after every chunk
    _dq, _dkv   parallel over chunks: dq and the gates' gradients; dk, dv

C before and dC after every chunk stay in memory for the length of a pass: T / L D Dv numbers a state head, in bfloat16 if the inputs are;
so do s / den and e d s in the backward pass: 2 T L numbers a query head, in the inputs' dtype.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from reference import _starts, mlstm_denominator, mlstm_state

from . import common
from .attend import LOG2E
from .common import DIMS, DTYPES, dense, launch, low, strides


def config(kernel: str, D: int, size: int) -> tuple[int, int, int, int]:
    """Channels of q and k at a time, value columns a tile, warps and stages of a kernel by head dim and bytes of an element."""
    if size == 4:
        return min(D, 64), min(D, 32), 4, 1
    if kernel in ("states", "dstates"):
        return min(D, 64), min(D, 32), 4, 2
    return min(D, 64), min(D, 128 if kernel == "outputs" else 64), 8, 1


def chunk(size: int) -> int:
    """L: steps a chunk by bytes of an element."""
    return 32 if size == 4 else 64


# ----------------------------------------------------------------------------- parts of kernels


@triton.jit
def _tile(x, t0, T, stride, d0, columns, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows t0 to t0 + ROWS and columns d0 to d0 + COLS of x; zeros from row T and from column `columns` on."""
    t, d = t0 + tl.arange(0, ROWS), d0 + tl.arange(0, COLS)
    return tl.load(x + t.to(tl.int64)[:, None] * stride + d[None, :], mask=(t < T)[:, None] & (d < columns)[None, :], other=0.0)


@triton.jit
def _put(x, t0, T, stride, d0, columns, y, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Stores what `_tile` loads."""
    t, d = t0 + tl.arange(0, ROWS), d0 + tl.arange(0, COLS)
    tl.store(x + t.to(tl.int64)[:, None] * stride + d[None, :], y.to(x.dtype.element_ty), mask=(t < T)[:, None] & (d < columns)[None, :])


@triton.jit
def _matrix(x, d0, e0, Dv, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows d0 to d0 + ROWS and columns e0 to e0 + COLS of a state (D, Dv)."""
    e = e0 + tl.arange(0, COLS)
    return tl.load(x + (d0 + tl.arange(0, ROWS))[:, None] * Dv + e[None, :], mask=(e < Dv)[None, :], other=0.0)


@triton.jit
def _exponents(g, i, document, at, L: tl.constexpr):
    """x_ts of the chunk whose first step is `at`, (L, L); -inf where t does not see s."""
    t = tl.arange(0, L)
    seen = t[:, None] >= t[None, :]
    if document is not None:
        own = tl.load(document + at + t)
        seen = seen & (own[:, None] == own[None, :])
    x = tl.cumsum(tl.where(t[:, None] > t[None, :], tl.load(g + at + t)[:, None], 0.0), 0)
    if i is not None:
        x += tl.load(i + at + t)[None, :]
    return tl.where(seen, x, float("-inf"))


@triton.jit
def _weights(g, i, m, document, at, document_at, L: tl.constexpr):
    """e_ts (L, L). m_t = -inf where nothing was written."""
    t = tl.arange(0, L)
    x = _exponents(g + at, None if i is None else i + at, None if document is None else document + document_at, 0, L)
    if m is not None:
        top = tl.load(m + at + t)
        x -= tl.where(top == float("-inf"), 0.0, top)[:, None]
    return tl.exp2(x * LOG2E)


@triton.jit
def _into_state(x, y, acc):
    """acc + x^T y with x (float32) in two parts of y's dtype, so that a state stays as exact as float32."""
    high = low(x, y.dtype)
    acc = tl.dot(tl.trans(high), y, acc, input_precision="ieee")
    if y.dtype != tl.float32:
        acc = tl.dot(tl.trans(low(x - high.to(tl.float32), y.dtype)), y, acc, input_precision="ieee")
    return acc


@triton.jit
def _program(N, Hs):
    """Of this program: batch row, state head, and number among N."""
    pid = tl.program_id(0)
    return (pid // N // Hs).to(tl.int64), (pid // N % Hs).to(tl.int64), pid % N


# ----------------------------------------------------------------------------- gates


@triton.jit(do_not_specialize=["N"])
def _gates(g, i, document, sums, top, last, Hs, N, L: tl.constexpr):
    """Of a chunk: F_t, max_s x_ts and x_Ls."""
    batch, h, n = _program(N, Hs)
    t = tl.arange(0, L)
    at = (batch * Hs + h) * N * L + n * L
    document_at = batch * N * L + n * L
    if document is not None:
        document += document_at
    x = _exponents(g + at, None if i is None else i + at, document, 0, L)
    seen = t[:, None] >= t[None, :]
    if document is not None:
        own = tl.load(document + t)
        seen = seen & (own[:, None] == own[None, :])
    tl.store(sums + at + t, tl.sum(tl.where(seen, tl.load(g + at + t)[None, :], 0.0), 1))
    tl.store(last + at + t, tl.max(tl.where((t == L - 1)[:, None], x, float("-inf")), 0))
    if top is not None:
        tl.store(top + at + t, tl.max(x, 1))


@triton.jit
def _after(a, b, c, d):
    """m -> max(a + m, b), then m -> max(c + m, d)."""
    return a + c, tl.maximum(b + c, d)


@triton.jit(do_not_specialize=["N"])
def _maxima(decay, top, m0, starts, end, N, BN: tl.constexpr):
    """(4') from chunk to chunk: m_{n+1} = max(decay_n + m_n, top_n); starts gets every m_n, end the last."""
    pid = tl.program_id(0).to(tl.int64)
    m = tl.load(m0 + pid)
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        at = pid * N + n
        a = tl.load(decay + at, mask=n < N, other=0.0)
        b = tl.load(top + at, mask=n < N, other=float("-inf"))
        a, b = tl.associative_scan((a, b), 0, _after)
        after = tl.maximum(a + m, b)
        tl.store(starts + at + 1, after, mask=n + 1 < N)
        if n0 == 0:
            tl.store(starts + pid * N, m)
        m = tl.sum(tl.where(n == tl.minimum(n0 + BN, N) - 1, after, 0.0), 0) if N > 0 else m
    tl.store(end + pid, m)


# ----------------------------------------------------------------------------- forward


@triton.jit(do_not_specialize=["T", "N"])
def _states(k, v, w, c, C0, n0, Cs, ns, C1, n1, k_strides, v_strides, T, Hs, N, Dv,
            D: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, L: tl.constexpr):
    """A tile of the state before every chunk, and after the last."""
    rows: tl.constexpr = D // BD
    tiles = rows * tl.cdiv(Dv, BV)
    batch, h, tile = _program(tiles, Hs)
    d0, e0 = tile % rows * BD, tile // rows * BV
    head = batch * Hs + h
    k += batch * k_strides[0] + h * k_strides[2]
    v += batch * v_strides[0] + h * v_strides[2]
    t, d, e = tl.arange(0, L), d0 + tl.arange(0, BD), e0 + tl.arange(0, BV)
    C = _matrix(C0 + head * D * Dv, d0, e0, Dv, BD, BV)
    if n0 is not None:
        norm = tl.load(n0 + head * D + d)
    at = d[:, None] * Dv + e[None, :]
    for n in range(N):
        tl.store(Cs + (head * N + n) * D * Dv + at, C.to(Cs.dtype.element_ty), mask=(e < Dv)[None, :])
        keys = _tile(k, n * L, T, k_strides[1], d0, D, L, BD)
        values = _tile(v, n * L, T, v_strides[1], e0, Dv, L, BV)
        step = (head * N + n) * L
        written = keys.to(tl.float32) * tl.load(w + step + t)[:, None]
        decay = tl.load(c + step + L - 1)
        if n0 is not None:
            tl.store(ns + (head * N + n) * D + d, norm, mask=d + e0 * D < D)  # the first tiles of columns
            norm = norm * decay + tl.sum(written, 0)
        C = _into_state(written, values, C * decay)
    tl.store(C1 + head * D * Dv + at, C, mask=(e < Dv)[None, :])
    if n0 is not None:
        tl.store(n1 + head * D + d, norm, mask=d + e0 * D < D)  # the first tiles of columns


@triton.jit(do_not_specialize=["T", "N"])
def _outputs(q, k, v, g, i, m, c, document, Cs, ns, o, den, q_strides, k_strides, v_strides, T, Hs, R, N, Dv, scale,
             D: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, L: tl.constexpr, PLAIN: tl.constexpr):
    """(6'), (7) of a chunk of one query head, a tile of value columns."""
    tiles = tl.cdiv(Dv, BV)
    pid = tl.program_id(0)
    r, tile, n = pid % R, pid // R % tiles, pid // R // tiles % N
    h, batch = (pid // R // tiles // N % Hs).to(tl.int64), (pid // R // tiles // N // Hs).to(tl.int64)
    state, head, t0, e0 = batch * Hs + h, h * R + r, n * L, tile * BV
    q += batch * q_strides[0] + head * q_strides[2]
    k += batch * k_strides[0] + h * k_strides[2]
    v += batch * v_strides[0] + h * v_strides[2]
    t = tl.arange(0, L)
    step = (state * N + n) * L
    e = _weights(g, i, m, document, step, (batch * N + n) * L, L)
    scores, num = tl.zeros([L, L], tl.float32), tl.zeros([L, BV], tl.float32)
    total = tl.zeros([L], tl.float32)
    for d0 in tl.static_range(0, D, BD):
        x, keys = _tile(q, t0, T, q_strides[1], d0, D, L, BD), _tile(k, t0, T, k_strides[1], d0, D, L, BD)
        scores = tl.dot(x, tl.trans(keys), scores, input_precision="ieee")
        C = _matrix(Cs + (state * N + n) * D * Dv, d0, e0, Dv, BD, BV)
        num = tl.dot(x.to(C.dtype), C, num, input_precision="ieee")
        if ns is not None:
            total += tl.sum(x.to(tl.float32) * tl.load(ns + (state * N + n) * D + d0 + tl.arange(0, BD))[None, :], 1)
    carry = tl.load(c + step + t) * scale
    scores = scores * (e * scale)
    values = _tile(v, t0, T, v_strides[1], e0, Dv, L, BV)
    num = tl.dot(low(scores, values.dtype), values, num * carry[:, None], input_precision="ieee")  # (6')
    if ns is not None:
        total = total * carry + tl.sum(scores, 1)
        tl.store(den + (state * R + r) * N * L + t0 + t, total, mask=t + tile * L < L)
        if PLAIN:
            total += 2.0**-126
        else:
            top = tl.load(m + step + t)
            total = tl.maximum(tl.abs(total), tl.maximum(tl.exp2(-top * LOG2E), 2.0**-126))
        num = num / total[:, None]                                                               # (7)
    H = Hs * R
    _put(o + (batch * T * H + head) * Dv, t0, T, H * Dv, e0, Dv, num, L, BV)


# ----------------------------------------------------------------------------- backward


@triton.jit(do_not_specialize=["T", "N"])
def _delta(o, do, delta, do_strides, T, Hs, R, N, Dv, BV: tl.constexpr, L: tl.constexpr):
    """d o_t . o_t of a chunk of one query head."""
    batch, head, n = _program(N, Hs * R)
    t0 = n * L
    total, H = tl.zeros([L], tl.float32), Hs * R
    do += batch * do_strides[0] + head * do_strides[2]
    for e0 in range(0, Dv, BV):
        x = _tile(do, t0, T, do_strides[1], e0, Dv, L, BV).to(tl.float32)
        total += tl.sum(x * _tile(o + (batch * T * H + head) * Dv, t0, T, H * Dv, e0, Dv, L, BV).to(tl.float32), 1)
    tl.store(delta + (batch * H + head) * N * L + t0 + tl.arange(0, L), total)


@triton.jit(do_not_specialize=["T", "N"])
def _dstates(q, do, c, inverse, dden, C0, ns, dC1, dn1, dCs, dns, dC0, dn0, inner, q_strides, do_strides, T, Hs, R, N, Dv, scale,
             D: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, L: tl.constexpr):
    """A tile of the gradient of the state after every chunk, and before the first; inner: the tile's part of C_0 . dC_L."""
    rows: tl.constexpr = D // BD
    tiles = rows * tl.cdiv(Dv, BV)
    batch, h, tile = _program(tiles, Hs)
    d0, e0 = tile % rows * BD, tile // rows * BV
    state = batch * Hs + h
    t, d, e = tl.arange(0, L), d0 + tl.arange(0, BD), e0 + tl.arange(0, BV)
    at = d[:, None] * Dv + e[None, :]
    dC = _matrix(dC1 + state * D * Dv, d0, e0, Dv, BD, BV)
    if dn1 is not None:
        dn = tl.load(dn1 + state * D + d)
    for j in range(N):
        n = N - 1 - j
        tl.store(dCs + (state * N + n) * D * Dv + at, dC.to(dCs.dtype.element_ty), mask=(e < Dv)[None, :])
        part = tl.sum(tl.sum(dC * _matrix(C0 + (state * N + n) * D * Dv, d0, e0, Dv, BD, BV).to(tl.float32), 1), 0)
        step = (state * N + n) * L
        carry, decay = tl.load(c + step + t) * scale, tl.load(c + step + L - 1)
        dC = dC * decay
        if dn1 is not None:
            tl.store(dns + (state * N + n) * D + d, dn, mask=d + e0 * D < D)  # the first tiles of columns
            part += tl.where(e0 == 0, tl.sum(dn * tl.load(ns + (state * N + n) * D + d), 0), 0.0)
            dn = dn * decay
        tl.store(inner + (state * N + n) * tiles + tile, part)
        for r in range(R):
            head = h * R + r
            row = (state * R + r) * N * L + n * L
            x = _tile(q + batch * q_strides[0] + head * q_strides[2], n * L, T, q_strides[1], d0, D, L, BD).to(tl.float32) * carry[:, None]
            if dn1 is not None:
                dn += tl.sum(x * tl.load(dden + row + t)[:, None], 0)
                x = x * tl.load(inverse + row + t)[:, None]
            y = _tile(do + batch * do_strides[0] + head * do_strides[2], n * L, T, do_strides[1], e0, Dv, L, BV)
            dC = _into_state(x, y, dC)
    tl.store(dC0 + state * D * Dv + at, dC, mask=(e < Dv)[None, :])
    if dn1 is not None:
        tl.store(dn0 + state * D + d, dn, mask=d + e0 * D < D)  # the first tiles of columns


@triton.jit(do_not_specialize=["T", "N"])
def _dq(q, k, v, do, g, i, m, c, document, Cs, ns, inverse, dden, dq, dc, di, dg, scores, dscores,
        q_strides, k_strides, v_strides, do_strides, T, Hs, R, N, Dv, scale,
        D: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, L: tl.constexpr):
    """Of a chunk of one query head: d q; d log c_t; s / den and e d s for `_dkv`; of d log e the sums over t and over s < u <= t."""
    pid = tl.program_id(0)
    r, n = pid % R, pid // R % N
    h, batch = (pid // R // N % Hs).to(tl.int64), (pid // R // N // Hs).to(tl.int64)
    state, head, t0 = batch * Hs + h, h * R + r, n * L
    q += batch * q_strides[0] + head * q_strides[2]
    k += batch * k_strides[0] + h * k_strides[2]
    v += batch * v_strides[0] + h * v_strides[2]
    do += batch * do_strides[0] + head * do_strides[2]
    t = tl.arange(0, L)
    step, row = (state * N + n) * L, (state * R + r) * N * L + t0
    e = _weights(g, i, m, document, step, (batch * N + n) * L, L) * scale
    s = tl.zeros([L, L], tl.float32)
    for d0 in tl.static_range(0, D, BD):
        s = tl.dot(_tile(q, t0, T, q_strides[1], d0, D, L, BD), tl.trans(_tile(k, t0, T, k_strides[1], d0, D, L, BD)), s,
                   input_precision="ieee")
    s = s * e
    at = row * L + t[:, None] * L + t[None, :]
    ds = tl.zeros([L, L], tl.float32)
    for e0 in range(0, Dv, BV):
        ds = tl.dot(_tile(do, t0, T, do_strides[1], e0, Dv, L, BV), tl.trans(_tile(v, t0, T, v_strides[1], e0, Dv, L, BV)), ds,
                    input_precision="ieee")
    if inverse is not None:
        over = tl.load(inverse + row + t)[:, None]
        tl.store(scores + at, low(s * over, scores.dtype.element_ty))
        ds = ds * over + tl.load(dden + row + t)[:, None]                                        # (7')
    else:
        tl.store(scores + at, low(s, scores.dtype.element_ty))
    s = s * ds  # d log e
    tl.store(di + row + t, tl.sum(s, 0))
    before = tl.cumsum(s, 1) - s  # in column u the sum over s < u
    tl.store(dg + row + t, tl.sum(tl.where(t[:, None] >= t[None, :], before, 0.0), 0))
    ds = low(ds * e, dscores.dtype.element_ty)
    tl.store(dscores + at, ds)
    carry = tl.load(c + step + t) * scale
    moved = tl.zeros([L], tl.float32)
    H = Hs * R
    for d0 in tl.static_range(0, D, BD):
        new = tl.zeros([L, BD], tl.float32)
        for e0 in range(0, Dv, BV):
            C = _matrix(Cs + (state * N + n) * D * Dv, d0, e0, Dv, BD, BV)
            new = tl.dot(_tile(do, t0, T, do_strides[1], e0, Dv, L, BV).to(C.dtype), tl.trans(C), new, input_precision="ieee")
        if inverse is not None:
            norm = tl.load(ns + (state * N + n) * D + d0 + tl.arange(0, BD))
            new = new * tl.load(inverse + row + t)[:, None] + tl.load(dden + row + t)[:, None] * norm[None, :]
        new = new * carry[:, None]
        moved += tl.sum(new * _tile(q, t0, T, q_strides[1], d0, D, L, BD).to(tl.float32), 1)
        new = tl.dot(ds, _tile(k, t0, T, k_strides[1], d0, D, L, BD), new, input_precision="ieee")
        _put(dq + (batch * T * H + head) * D, t0, T, H * D, d0, D, new, L, BD)
    tl.store(dc + row + t, moved)


@triton.jit(do_not_specialize=["T", "N"])
def _dkv(q, k, v, do, w, scores, dscores, dCs, dns, dk, dv, into, q_strides, k_strides, v_strides, do_strides,
         T, Hs, R, N, Dv, D: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, L: tl.constexpr):
    """d k, d v of a chunk of one state head, and what the new state asks of log e_Ls."""
    batch, h, n = _program(N, Hs)
    state, t0 = batch * Hs + h, n * L
    k += batch * k_strides[0] + h * k_strides[2]
    v += batch * v_strides[0] + h * v_strides[2]
    t = tl.arange(0, L)
    weight = tl.load(w + (state * N + n) * L + t)
    moved = tl.zeros([L], tl.float32)
    dCs += (state * N + n) * D * Dv
    square = t[None, :] * L + t[:, None]  # transposed
    for d0 in tl.static_range(0, D, BD):
        new = tl.zeros([L, BD], tl.float32)
        for e0 in range(0, Dv, BV):
            dC = _matrix(dCs, d0, e0, Dv, BD, BV)
            new = tl.dot(_tile(v, t0, T, v_strides[1], e0, Dv, L, BV).to(dC.dtype), tl.trans(dC), new, input_precision="ieee")
        if dns is not None:
            new += tl.load(dns + (state * N + n) * D + d0 + tl.arange(0, BD))[None, :]
        moved += tl.sum(new * _tile(k, t0, T, k_strides[1], d0, D, L, BD).to(tl.float32), 1)
        new = new * weight[:, None]
        for r in range(R):
            x = _tile(q + batch * q_strides[0] + (h * R + r) * q_strides[2], t0, T, q_strides[1], d0, D, L, BD)
            ds = tl.load(dscores + ((state * R + r) * N * L + t0) * L + square)
            new = tl.dot(ds, x, new, input_precision="ieee")
        _put(dk + (batch * T * Hs + h) * D, t0, T, Hs * D, d0, D, new, L, BD)
    for e0 in range(0, Dv, BV):
        dV = tl.zeros([L, BV], tl.float32)
        for d0 in tl.static_range(0, D, BD):
            dC = _matrix(dCs, d0, e0, Dv, BD, BV)
            dV = tl.dot(_tile(k, t0, T, k_strides[1], d0, D, L, BD).to(dC.dtype), dC, dV, input_precision="ieee")
        dV = dV * weight[:, None]
        for r in range(R):
            row = (state * R + r) * N * L + t0
            y = _tile(do + batch * do_strides[0] + (h * R + r) * do_strides[2], t0, T, do_strides[1], e0, Dv, L, BV)
            dV = tl.dot(tl.load(scores + row * L + square), y, dV, input_precision="ieee")
        _put(dv + (batch * T * Hs + h) * Dv, t0, T, Hs * Dv, e0, Dv, dV, L, BV)
    tl.store(into + (state * N + n) * L + t, moved * weight)


# ----------------------------------------------------------------------------- autograd


class _Chunkwise(torch.autograd.Function):
    """Kept from the forward pass: the inputs, o, den, m, c, w; the states are made again."""

    @staticmethod
    def forward(ctx, q, k, v, g, i, C, n, m, document, normalizer, scale, m0):
        """g, i (B, Hs, N L), float32; document (B, N L) int32 from 0 on; n, m, i None: a scan."""
        ctx.set_materialize_grads(False)
        (B, T, H, D), Hs, Dv, size = q.shape, k.shape[2], v.shape[3], q.element_size()
        L = chunk(size)
        N, new = g.shape[2] // L, dict(dtype=torch.float32, device=q.device)
        sums, last = (common.empty(g.shape, **new) for _ in range(2))
        top = None if i is None else common.empty(g.shape, **new)
        fresh = None
        with torch.cuda.device_of(q):
            launch(_gates, B * Hs * N, g, i, document, sums, top, last, Hs, N, L, num_warps=4)
            if document is not None:
                before = F.pad(document, (1, 0))[:, :-1][:, ::L]  # the document of the step before each chunk
                fresh = (document.unflatten(1, (N, L)) != before[..., None]).flatten(1)[:, None]  # (B, 1, N L)
            m_, m1 = None, None
            if i is not None:
                ends = sums[..., L - 1 :: L] if fresh is None else torch.where(fresh[..., L - 1 :: L], -math.inf, sums[..., L - 1 :: L])
                tops = top[..., L - 1 :: L]
                if fresh is not None:
                    tops = torch.where(fresh[..., L - 1 :: L], torch.maximum(tops, sums[..., L - 1 :: L] + m0), tops)
                starts, m1 = common.empty((B, Hs, N), **new), common.empty((B, Hs), **new)
                launch(_maxima, B * Hs, ends.contiguous(), tops.contiguous(), m.contiguous(), starts, m1, N, 256, num_warps=4)
                old = sums + starts.repeat_interleave(L, -1)
                old = old if fresh is None else torch.where(fresh, sums + m0, old)
                m_ = torch.maximum(old, top)                                                 # (4')
            else:
                old = sums
            shift = 0.0 if m_ is None else m_.masked_fill(m_ == -math.inf, 0)
            c = (old - shift).exp()
            c = (c if fresh is None else c.masked_fill(fresh, 0)).contiguous()
            at_end = 0.0 if m_ is None else shift[..., L - 1 :: L].repeat_interleave(L, -1)
            w = (last - at_end).exp().contiguous()
            o = common.empty((B, T, H, Dv), q.dtype, q.device)
            den = None if n is None else common.empty((B, H, N * L), **new)
            Cs, ns, C1, n1 = _Chunkwise.states(k, v, w, c, C, n, N, L)
            BD, BV, warps, stages = config("outputs", D, size)
            launch(_outputs, B * H * N * triton.cdiv(Dv, BV), q, k, v, g, i, m_, c, document, Cs, ns, o, den, strides(q), strides(k),
                   strides(v), T, Hs, H // Hs, N, Dv, scale, D, BD, BV, L, normalizer == "plain", num_warps=warps, num_stages=stages)
        ctx.save_for_backward(q, k, v, g, i, C, n, m_, c, w, document, fresh, o, den, C1, n1)
        ctx.rest = normalizer, scale
        return o, C1, n1, m1

    @staticmethod
    def states(k, v, w, c, C, n, N, L):
        """The states before every chunk, in bfloat16 if k is, and the last."""
        (B, T, Hs, D), Dv, new = k.shape, v.shape[3], dict(dtype=torch.float32, device=k.device)
        Cs = common.empty((B, Hs, N, D, Dv), torch.bfloat16 if k.dtype == torch.bfloat16 else torch.float32, k.device)
        C1, ns, n1 = common.empty((B, Hs, D, Dv), **new), None, None
        if n is not None:
            ns, n1 = common.empty((B, Hs, N, D), **new), common.empty((B, Hs, D), **new)
        BD, BV, warps, stages = config("states", D, k.element_size())
        launch(_states, B * Hs * (D // BD) * triton.cdiv(Dv, BV), k, v, w, c, C.contiguous(), None if n is None else n.contiguous(), Cs, ns,
               C1, n1, strides(k), strides(v), T, Hs, N, Dv, D, BD, BV, L, num_warps=warps, num_stages=stages)
        return Cs, ns, C1, n1

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dC, dn, dm):
        q, k, v, g, i, C, n, m, c, w, document, fresh, o, den, C1, n1 = ctx.saved_tensors
        normalizer, scale = ctx.rest
        (B, T, H, D), Hs, Dv, size = q.shape, k.shape[2], v.shape[3], q.element_size()
        R, L, new = H // Hs, chunk(size), dict(dtype=torch.float32, device=q.device)
        N = g.shape[2] // L
        do = torch.zeros_like(o) if do is None else dense(do)
        passed = any(x is not None for x in (dC, dn, dm)) and n is not None
        dm_ = None
        if passed:  # C = (C e^m) e^-m
            dm_ = torch.zeros_like(n1[..., 0]) if dm is None else dm
            dm_ = dm_ - (0 if dC is None else (dC * C1).sum((-1, -2))) - (0 if dn is None else (dn * n1).sum(-1))
        dC = torch.zeros_like(C1) if dC is None else dC.contiguous()
        dn = None if n is None else torch.zeros_like(n1) if dn is None else dn.contiguous()
        inverse = dden = None
        with torch.cuda.device_of(q):
            Cs, ns, _, _ = _Chunkwise.states(k, v, w, c, C, n, N, L)
            if n is not None:
                delta = common.empty((B, H, N * L), **new)
                launch(_delta, B * H * N, o, do, delta, strides(do), T, Hs, R, N, Dv, config("dq", D, size)[1], L, num_warps=4)
                top = m.repeat_interleave(R, 1)
                inverse = 1 / mlstm_denominator(den, top, normalizer)                        # (7')
                dden = -delta * inverse
                if normalizer == "floor":
                    dden = dden * den.sign() * (den.abs() >= (-top).exp())
                dden, inverse = dden.contiguous(), inverse.contiguous()
            dCs = common.empty(Cs.shape, Cs.dtype, q.device)
            dC0, dns, dn0 = common.empty(C1.shape, **new), None, None
            if n is not None:
                dns, dn0 = common.empty(ns.shape, **new), common.empty(n1.shape, **new)
            BD, BV, warps, stages = config("dstates", D, size)
            tiles = D // BD * triton.cdiv(Dv, BV)
            inner = common.empty((B, Hs, N, tiles), **new)
            launch(_dstates, B * Hs * tiles, q, do, c, inverse, dden, Cs, ns, dC, dn, dCs, dns, dC0, dn0, inner, strides(q), strides(do),
                   T, Hs, R, N, Dv, scale, D, BD, BV, L, num_warps=warps, num_stages=stages)
            dq, dk, dv = (common.empty(x.shape, x.dtype, x.device) for x in (q, k, v))
            dc, di, dg = (common.empty((B, H, N * L), **new) for _ in range(3))
            scores, dscores = (common.empty((B, H, N * L, L), q.dtype, q.device) for _ in range(2))
            BD, BV, warps, stages = config("dq", D, size)
            launch(_dq, B * H * N, q, k, v, do, g, i, m, c, document, Cs, ns, inverse, dden, dq, dc, di, dg, scores, dscores, strides(q),
                   strides(k), strides(v), strides(do), T, Hs, R, N, Dv, scale, D, BD, BV, L, num_warps=warps, num_stages=stages)
            into = common.empty(g.shape, **new)
            BD, BV, warps, stages = config("dkv", D, size)
            launch(_dkv, B * Hs * N, q, k, v, do, w, scores, dscores, dCs, dns, dk, dv, into, strides(q), strides(k), strides(v),
                   strides(do), T, Hs, R, N, Dv, D, BD, BV, L, num_warps=warps, num_stages=stages)
        # what the gates get of the state that a chunk hands on
        by_chunk = (B, Hs, N, L)
        dc, di, dg = (x.view(B, Hs, R, N, L).sum(2) for x in (dc, di, dg))
        dc[..., -1] += c.view(by_chunk)[..., -1] * inner.sum(-1)
        own = into.view(by_chunk)  # d log e_Ls
        if passed:  # the m handed on is the greatest exponent of the chunk's last row, or the old m (a document's m0) decayed
            last = w.view(by_chunk)
            top = last.argmax(-1, keepdim=True)
            decayed = last.gather(-1, top)[..., 0] < 1                                       # (B, Hs, N)
            ends = None if fresh is None else fresh.view(B, 1, N, L)[..., -1]
            through = decayed if fresh is None else decayed & ~ends
            dms = torch.cat([through[..., 1:], torch.ones_like(through[..., :1])], -1).flip(-1).cumprod(-1).flip(-1) * dm_[..., None]
            own = own.scatter_add(-1, top, torch.where(decayed, 0, dms)[..., None])
            dc[..., -1] += torch.where(through, dms, 0)
        di = di + own
        # d log e_Ls passes every decay after s
        dg = dg + F.pad(own.cumsum(-1)[..., :-1], (1, 0)) + dc.flip(-1).cumsum(-1).flip(-1)
        if passed and fresh is not None:
            d = document.view(B, 1, N, L)
            since = (d == d[..., -1:]) & ends[..., None]
            dg = dg + torch.where(since & decayed[..., None], dms[..., None], 0)
        d_m = None if n is None else dc[:, :, 0].sum(-1)
        return dq, dk, dv, dg.flatten(2), None if i is None else di.flatten(2), dC0, dn0, d_m, None, None, None, None


def mlstm(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, *, state: tuple[Tensor, ...] | None = None,
          segment: Tensor | None = None, normalizer: str = "floor", scale: float | None = None, m0: float = 0.0):
    """reference.mlstm on CUDA, or anywhere under TRITON_INTERPRET=1.

    q (B, T, H, D), k, v (B, T, Hs, D) of one dtype, float32, float16 or bfloat16; i, f (B, T, Hs) and the state (C, n, m) of any float
    dtype, computed in float32; segment (B, T). Returns o (B, T, H, D) in q's dtype and the state in float32. All float inputs have
    gradients. Raises ValueError for what the kernels do not do.
    """
    check("mlstm", q, k, v, i=i, f=f, segment=segment)
    (B, T, H, D), Hs = q.shape, k.shape[2]
    common.need("mlstm", v.shape == k.shape, f"v {tuple(v.shape)} must be k's {tuple(k.shape)}")
    common.need("mlstm", normalizer in ("floor", "plain"), f"normalizer {normalizer!r}: 'floor' or 'plain'")
    C, n, m = mlstm_state(B, Hs, D, m0=m0, device=q.device) if state is None else state
    common.need("mlstm", (C.shape, n.shape, m.shape) == ((B, Hs, D, D), (B, Hs, D), (B, Hs)), f"state must be C {(B, Hs, D, D)}, n, m")
    common.need_device("mlstm", q, C=C, n=n, m=m)
    if not T:
        return q * 1, (C.float(), n.float(), m.float())
    g, i = by_chunk(F.logsigmoid(f.float()), 0.0, chunk(q.element_size())), by_chunk(i.float(), -math.inf, chunk(q.element_size()))
    o, *state = _Chunkwise.apply(*map(dense, (q, k, v)), g, i, C.float(), n.float(), m.float(), documents(segment, g.shape[2]), normalizer,
                                 D**-0.5 if scale is None else scale, m0)
    return o, tuple(state)


def scan(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor | None = None, *, state: Tensor | None = None, segment: Tensor | None = None):
    """reference.scan with a decay per head, log_a (B, T, Hs), or none, and without a bonus; as `mlstm`. v may have another head dim Dv.

    state (B, Hs, D, Dv). Returns o (B, T, H, Dv) in q's dtype and the state in float32.
    """
    check("scan", q, k, v, log_a=log_a, segment=segment)
    (B, T, H, D), Hs, Dv = q.shape, k.shape[2], v.shape[3]
    common.need("scan", state is None or state.shape == (B, Hs, D, Dv), f"state must be {(B, Hs, D, Dv)}")
    common.need_device("scan", q, state=state)
    log_a = torch.zeros(B, T, Hs, device=q.device) if log_a is None else log_a.float()
    C = torch.zeros(B, Hs, D, Dv, device=q.device) if state is None else state.float()
    if not T:
        return v.new_zeros(B, 0, H, Dv), C
    g = by_chunk(log_a, 0.0, chunk(q.element_size()))
    o, C, _, _ = _Chunkwise.apply(*map(dense, (q, k, v)), g, None, C, None, None, documents(segment, g.shape[2]), "none", 1.0, 0.0)
    return o, C


def by_chunk(x: Tensor, value: float, L: int) -> Tensor:
    """(B, T, Hs) -> (B, Hs, N L), the steps past T being `value`."""
    return F.pad(x.transpose(1, 2), (0, -x.shape[1] % L), value=value).contiguous()


def documents(segment: Tensor | None, steps: int) -> Tensor | None:
    """The document of each step, (B, steps) int32, 0 at first; steps past the end belong to the last one."""
    if segment is None or not segment.shape[1]:
        return None
    number = _starts(segment).cumsum(1).int()
    return F.pad(number[None].float(), (0, steps - number.shape[1]), mode="replicate")[0].int().contiguous()


def check(op, q, k, v, segment=None, **gates):
    """ValueError, one line by name, for what the kernels do not do."""
    def need(holds, message):
        common.need(op, holds, message)

    need(q.ndim == k.ndim == v.ndim == 4,
         f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must be (batch, time, heads, head dim)")
    B, T, H, D = q.shape
    Hs = k.shape[2]
    need(D in DIMS, f"head dim {D}: 16, 32, 64, 128 or 256")
    need(q.dtype in DTYPES, f"{q.dtype}: float32, float16 or bfloat16")
    need(k.shape == (B, T, Hs, D), f"k {tuple(k.shape)} must be {(B, T, Hs, D)}, as many steps and channels as q")
    need(v.shape[:3] == k.shape[:3] and v.shape[3], f"v {tuple(v.shape)} must be {(B, T, Hs)} and its head dim")
    need(Hs and H % Hs == 0, f"{H} query heads are no multiple of {Hs} state heads")
    for name, x in dict(k=k, v=v).items():
        need(x.dtype == q.dtype, f"{name} is {x.dtype}, q is {q.dtype}: one dtype for all")
    for name, x in gates.items():
        need(x is None or x.shape == (B, T, Hs) and x.is_floating_point(), f"{name} must be {(B, T, Hs)}, a float for each state head")
    need(segment is None or segment.shape == (B, T), f"segment must be {(B, T)}")
    common.need_device(op, q, k=k, v=v, segment=segment, **gates)


# ----------------------------------------------------------------------------- machine code without a GPU

KERNELS = {"gates": _gates, "maxima": _maxima, "states": _states, "outputs": _outputs, "delta": _delta, "dstates": _dstates, "dq": _dq,
           "dkv": _dkv}
FORWARD = tuple(f"chunkwise {name}" for name in ("gates", "maxima", "states", "outputs"))
OPTIONS = {"scan": "", "scan packed": "document", "mlstm": "mlstm", "mlstm packed": "mlstm document"}


def launches(D: int, dtype: str):
    """Every way the ops launch a kernel at head dim D, for common.usage: (name, options, kernel, types, constants, warps, stages)."""
    size = 4 if dtype == "fp32" else 2
    for name, kernel in KERNELS.items():
        for options, words in OPTIONS.items():
            if name in ("maxima", "delta") and options != "mlstm":
                continue
            BD, BV, warps, stages = {"gates": (0, 0, 4, 3), "maxima": (0, 0, 4, 3), "delta": (D, config("dq", D, size)[1], 4, 3)}.get(
                name) or config(name, D, size)
            off = set() if "mlstm" in words else {"i", "m", "n0", "n1", "ns", "top", "den", "inverse", "dden", "dn1", "dns", "dn0"}
            off |= set() if "document" in words else {"document"}
            constants = {"D": D, "BD": BD, "BV": BV, "L": chunk(size), "BN": 256, "PLAIN": False} | dict.fromkeys(off)
            types = dict.fromkeys(("q", "k", "v", "o", "do", "dq", "dk", "dv", "scores", "dscores"), "*" + dtype)
            types |= dict.fromkeys(("Cs", "dCs"), "*bf16" if dtype == "bf16" else "*fp32")
            types |= dict.fromkeys(("T", "Hs", "R", "N", "Dv"), "i32") | {"document": "*i32", "scale": "fp32"}
            types |= {x + "_strides": "strides" for x in ("q", "k", "v", "do")}
            if name == "dstates":
                types |= {"C0": types["Cs"]}
            types = dict.fromkeys(kernel.arg_names, "*fp32") | types
            constants = {x: constants[x] for x in kernel.arg_names if x in constants}
            yield f"chunkwise {name}", options, kernel, types, constants, warps, stages
