"""reference.scan and reference.delta, forward and backward, with decays per channel, per head or none.

A chunk is (10) on L = 16 steps, solved for U. C_0 is the state before it, e_t = e^{log_a up to t}, e-_t = e^{log_a up to t-1} (both 0
if the document of t began in the chunk), l_s = E_{L,s} (0 if the document of s ends in the chunk), w = e_L, all masked so that
documents do not meet, and M = (1 - [c, b))^-1, N = M [c, k), W = M (c e-), J = b l:

    U = N V + W C_0
    O = A V + Q C_0            with A = [q, k] + [q, b] N,  Q = q e + [q, b] W                (10)
    C_1 = w C_0 + K^T V + J^T (W C_0)            with K = k l + N^T J                         (10b)

With d for the gradient of the loss, the transposed system, and Y = d of the right side of U = M (...):

    dC_0 = w dC_1 + Q^T dO + W^T (J dC_1),  dV = A^T dO + K dC_1,  Y = M^T ([q, b]^T dO + J dC_1)      (10')
    d[q, k] = dO V^T,  d[q, b] = dO U^T,  d[c, k) = Y V^T,  d[c, b) = Y U^T
    d(q e) = dO C_0^T,  d(c e-) = Y C_0^T,  d(k l) = V dC_1^T,  d(b l) = U dC_1^T,  dw = row sums of C_0 * dC_1

Each d log_a_j is the sum of all d log E_ts with s < j <= t (and those of e, e-, l, w that pass j), added up as they are: no
difference, no division. Without b, M = 1 and what has a b or c is left out. With a bonus (8) q reads like c, [q, k) and e-, and
(q . u k_t) stands on the diagonal.

    _pairs      parallel over chunks: A, N, M, [q, b]
    _factors    parallel over chunks and channels: Q, K, J, W, w
    _walk       serial over chunks, parallel over tiles of value columns: the states, (10b); backwards, with Q, J, W for K, W, J: (10')
    _outputs    parallel: O
    _values     parallel: U, Y, dV, dw
    _products   parallel: the products that sum over value columns: three launches
    _local      parallel over chunks and channels: dq, dk, db, dc, dlog_a, dbonus

The walk keeps its state in float32. In half precision a factor is stored in two parts, itself rounded to q's dtype and what that
leaves, and a dot of two float32 operands is three of parts (two with v or dO, which are exact): about 2^-16 of a state in bfloat16,
2^-22 in float16, whose numbers end at 65504 (clipped) and are no finer than 2^-24. The L x L matrices are float32, their dots
3xTF32. The parallel kernels read states and factors rounded to q's dtype. States must be finite in float32.

All of it runs on `group` chunks at a time, so that scratch stays small.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from reference import _starts

from . import common
from .common import DIMS, DTYPES, dense, launch, low, strides

L = tl.constexpr(16)  # steps a chunk
STATES = 2**26  # numbers that the states of a group of chunks may have


def config(kernel: str, D: int, size: int, R: int = 1) -> tuple[int, int, int]:
    """Columns a tile (of values; `local`: of channels), warps and stages of a kernel by head dim, bytes of an element and, for the
    walk backwards, query heads a state."""
    if kernel == "pairs channel":
        return 0, 4 if D >= 64 else 1, 1
    if kernel == "pairs":
        return 0, 1 if D <= 128 else 2, 1
    if kernel == "walk":
        return 16, 4 if D <= 128 else 8, 2 if R <= 4 and R * D <= 512 else 1
    if kernel == "values":
        return 32 if D <= 64 else 16, 4 if D <= 128 else 8, 1
    if kernel in ("factors", "local"):
        return min(D, 64), 4, 1
    return 32 if D <= 128 else 16, 4, 1


def precision(size: int) -> str:
    """Of dots of float32 operands: exact for float32 inputs, 3xTF32 (about 2^-22) for half precision."""
    return "ieee" if size == 4 else "tf32x3"


def group(states: int, D: int, Dv: int) -> int:
    """Chunks at a time, for a number of state heads of all batch rows."""
    return min(1024, max(4, STATES // max(1, states * D * Dv)))


# ----------------------------------------------------------------------------- parts of kernels


@triton.jit
def _program(chunks, Hs):
    """Of this program: batch row, state head and chunk."""
    pid = tl.program_id(0)
    return (pid // chunks // Hs).to(tl.int64), (pid // chunks % Hs).to(tl.int64), pid % chunks


@triton.jit
def _rows(x, t0, T, stride, d0, COLS: tl.constexpr, width):
    """Rows t0 to t0 + L of x, columns d0 to d0 + COLS; zeros from row T and column `width` on."""
    t, d = t0 + tl.arange(0, L), d0 + tl.arange(0, COLS)
    return tl.load(x + t.to(tl.int64)[:, None] * stride + d[None, :], mask=(t < T)[:, None] & (d < width)[None, :], other=0.0)


@triton.jit
def _put_rows(x, t0, T, stride, d0, COLS: tl.constexpr, width, y):
    """The inverse of `_rows`, in x's dtype."""
    t, d = t0 + tl.arange(0, L), d0 + tl.arange(0, COLS)
    tl.store(x + t.to(tl.int64)[:, None] * stride + d[None, :], low(y, x.dtype.element_ty), mask=(t < T)[:, None] & (d < width)[None, :])


@triton.jit
def _tile(x, COLS: tl.constexpr):
    """The contiguous (L, COLS) at x."""
    return tl.load(x + tl.arange(0, L)[:, None] * COLS + tl.arange(0, COLS)[None, :])


@triton.jit
def _put_tile(x, COLS: tl.constexpr, y):
    tl.store(x + tl.arange(0, L)[:, None] * COLS + tl.arange(0, COLS)[None, :], low(y, x.dtype.element_ty))


@triton.jit
def _put_parts(x, d0, COLS: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, y):
    """y into columns d0 to d0 + COLS of the contiguous (PARTS, L, D) at x: y in x's dtype, and what that leaves of it."""
    at = x + tl.arange(0, L)[:, None] * D + d0 + tl.arange(0, COLS)[None, :]
    first = low(y, x.dtype.element_ty)
    tl.store(at, first)
    if PARTS == 2:
        tl.store(at + L * D, low(y - first.to(tl.float32), x.dtype.element_ty))


@triton.jit
def _times(x, y, acc, D: tl.constexpr, PARTS: tl.constexpr, TRANS: tl.constexpr):
    """acc + F y or acc + F^T y of the factor F (L, D) at x in PARTS; y float32, or in half precision exact in F's dtype."""
    f = _tile(x, D)
    if TRANS:
        f = tl.trans(f)
    if PARTS == 1:
        acc = tl.dot(f, y, acc, input_precision="ieee")
    else:
        f_ = _tile(x + L * D, D)
        if TRANS:
            f_ = tl.trans(f_)
        if y.dtype == tl.float32:
            first = low(y, f.dtype)
            acc = tl.dot(f, low(y - first.to(tl.float32), f.dtype), acc)
            y = first
        acc = tl.dot(f, y, tl.dot(f_, y, acc))
    return acc


@triton.jit
def _state(x, e0, Dv, Dp, D: tl.constexpr, BV: tl.constexpr):
    """Columns e0 to e0 + BV of the state (D, Dp) at x; zeros from column Dv on."""
    e = e0 + tl.arange(0, BV)
    return tl.load(x + tl.arange(0, D)[:, None] * Dp + e[None, :], mask=(e < Dv)[None, :], other=0.0)


@triton.jit
def _put_state(x, e0, Dv, Dp, D: tl.constexpr, BV: tl.constexpr, y):
    e = e0 + tl.arange(0, BV)
    tl.store(x + tl.arange(0, D)[:, None] * Dp + e[None, :], low(y, x.dtype.element_ty), mask=(e < Dv)[None, :])


@triton.jit
def _row(x, t, T, stride, d0, COLS: tl.constexpr):
    """Row t of x in float32, (1, COLS); zeros from row T on."""
    t = t + tl.zeros([1, COLS], tl.int32)
    return tl.load(x + t.to(tl.int64) * stride + (d0 + tl.arange(0, COLS))[None, :], mask=t < T, other=0.0).to(tl.float32)


@triton.jit
def _log_decays(g, t0, first, end, stride, d0, COLS: tl.constexpr, VECTOR: tl.constexpr):
    """Rows t0 to t0 + L of log_a, (L, COLS) or (L, 1); zeros before row `first` and from row `end` on."""
    t = t0 + tl.arange(0, L)
    here = ((t >= first) & (t < end))[:, None]
    if g is None:
        return tl.where(here, 0.0, 0.0)
    elif VECTOR:
        at = t.to(tl.int64)[:, None] * stride + (d0 + tl.arange(0, COLS))[None, :]
        return tl.load(g + at, mask=here, other=0.0).to(tl.float32)
    else:
        return tl.load(g + t.to(tl.int64)[:, None] * stride, mask=here, other=0.0).to(tl.float32)


@triton.jit
def _carry(g, t0, T, stride, live, d0, COLS: tl.constexpr, VECTOR: tl.constexpr, SHIFT: tl.constexpr):
    """e, or with SHIFT e-, of the chunk at t0."""
    x = _log_decays(g, t0 - SHIFT, t0, T, stride, d0, COLS, VECTOR)
    return tl.where(live[:, None], tl.exp(tl.cumsum(x, 0)), 0.0)


@triton.jit
def _after(g, t0, T, stride, last, d0, COLS: tl.constexpr, VECTOR: tl.constexpr):
    """l of the chunk at t0."""
    x = _log_decays(g, t0 + 1, t0, tl.minimum(t0 + L, T), stride, d0, COLS, VECTOR)
    return tl.where(last[:, None], tl.exp(tl.cumsum(x, 0, reverse=True)), 0.0)


@triton.jit
def _document(document, t, T):
    """The documents of steps t; steps from T on are the last one's. Without documents 0."""
    if document is None:
        return t * 0
    else:
        return tl.load(document + 1 + tl.minimum(t, T - 1))


@triton.jit
def _ends(document, t0, T):
    """Of the chunk at t0: its documents, who sees the state before it, who reaches the state after it, and whether the former does."""
    own = _document(document, t0 + tl.arange(0, L), T)
    if document is None:
        return own, own == 0, own == 0, t0 >= 0
    else:
        before, last = tl.load(document + t0), tl.load(document + tl.minimum(t0 + L, T))
        return own, own == before, own == last, before == last


@triton.jit
def _pair_decays(g, own, t0, T, stride, SHIFT: tl.constexpr, P: tl.constexpr):
    """E_ts, or with SHIFT E_{t-1,s}, of decays per head, (L, L); 0 where t does not see s."""
    t = tl.arange(0, L)
    seen = (t[:, None] >= t[None, :] + SHIFT) & (own[:, None] == own[None, :])
    if g is None:
        return tl.where(seen, 1.0, 0.0)
    else:
        step = tl.load(g + (t0 + t).to(tl.int64) * stride, mask=t0 + t < T, other=0.0).to(tl.float32)
        step = tl.where(t[None, :] + SHIFT <= t[:, None], tl.maximum(step, -1e4)[None, :], 0.0)  # no infinity: it is multiplied by 0
        S = tl.dot(step, tl.where(t[:, None] > t[None, :], 1.0, 0.0), input_precision=P)
        return tl.where(seen, tl.exp(tl.minimum(S, 0.0)), 0.0)


# ----------------------------------------------------------------------------- forward


@triton.jit
def _pair_matrices(x, keys, rows_b, E, k, b, g, k_stride, b_stride, g_stride, own, document, t0, T,
                   D: tl.constexpr, VECTOR: tl.constexpr, SHIFT: tl.constexpr, DELTA: tl.constexpr):
    """[x, k] and [x, b], with SHIFT [x, k) and [x, b), of the chunk at t0. A decay per channel: column after column, S is log E_ts, or
    log E_{t-1,s}, of column s."""
    t = tl.arange(0, L)
    if VECTOR:
        xk, xb = tl.zeros([L, L], tl.float32), tl.zeros([L, L], tl.float32)
        S = tl.zeros([L, D], tl.float32)
        x = x.to(tl.float32)
        for i in range(L):
            s = L - 1 - i
            S = tl.where((t > s + SHIFT)[:, None], S + _row(g, t0 + s + 1, T, g_stride, 0, D), 0.0)
            xe = x * tl.exp(S)
            here = (t[None, :] == s) & ((t >= s + SHIFT) & (own == _document(document, t0 + s, T)))[:, None]
            xk = tl.where(here, tl.sum(xe * _row(k, t0 + s, T, k_stride, 0, D), 1)[:, None], xk)
            if DELTA:
                xb = tl.where(here, tl.sum(xe * _row(b, t0 + s, T, b_stride, 0, D), 1)[:, None], xb)
    else:
        xk = tl.where(E > 0, E * tl.dot(x, tl.trans(keys), input_precision="ieee"), 0.0)
        xb = xk
        if DELTA:
            xb = tl.where(E > 0, E * tl.dot(x, tl.trans(rows_b), input_precision="ieee"), 0.0)
    return xk, xb


@triton.jit
def _inverse(x):
    """(1 - x)^-1 of x (L, L), 0 on and above its diagonal: forward substitution."""
    t = tl.arange(0, L)
    y = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    for j in range(L - 1):  # row j is done: into the rows below
        column = tl.sum(tl.where(t[None, :] == j, x, 0.0), 1)
        row = tl.sum(tl.where(t[:, None] == j, y, 0.0), 0)
        y += column[:, None] * row[None, :]
    return y


@triton.jit(do_not_specialize=["T", "chunks"])
def _pairs(q, k, g, b, c, bonus, document, A, N, M, qb, q_strides, k_strides, g_strides, b_strides, c_strides, d_stride,
           T, Hs, R, chunks, D: tl.constexpr, VECTOR: tl.constexpr, P: tl.constexpr):
    """The matrices A, N, M and [q, b] of a chunk."""
    batch, h, n = _program(chunks, Hs)
    i, t0, t = (batch * Hs + h) * chunks + n, n * L, tl.arange(0, L)
    DELTA: tl.constexpr = b is not None
    BONUS: tl.constexpr = bonus is not None
    q += batch * q_strides[0] + h * R * q_strides[2]
    k += batch * k_strides[0] + h * k_strides[2]
    if g is not None:
        g += batch * g_strides[0] + h * g_strides[2]
    if document is not None:
        document += batch * d_stride
    own, live, last, through = _ends(document, t0, T)
    keys = _rows(k, t0, T, k_strides[1], 0, D, D)
    rows_b, E = keys, own
    if DELTA:
        b += batch * b_strides[0] + h * b_strides[2]
        rows_b = _rows(b, t0, T, b_strides[1], 0, D, D)
        if not VECTOR:
            E = _pair_decays(g, own, t0, T, g_strides[1], True, P)
        x = _rows(c + batch * c_strides[0] + h * c_strides[2], t0, T, c_strides[1], 0, D, D)
        xk, xb = _pair_matrices(x, keys, rows_b, E, k, b, g, k_strides[1], b_strides[1], g_strides[1], own, document, t0, T,
                                D, VECTOR, True, True)
        inverse = _inverse(xb)
        N_ = tl.dot(inverse, xk, input_precision=P)
        _put_tile(N + i * (L * L), L, N_)
        _put_tile(M + i * (L * L), L, inverse)
    if not VECTOR:
        E = _pair_decays(g, own, t0, T, g_strides[1], BONUS, P)
    for r in range(R):
        x = _rows(q + r * q_strides[2], t0, T, q_strides[1], 0, D, D)
        xk, xb = _pair_matrices(x, keys, rows_b, E, k, b, g, k_strides[1], b_strides[1], g_strides[1], own, document, t0, T,
                                D, VECTOR, BONUS, DELTA)
        i = ((batch * Hs + h) * R + r) * chunks + n
        if BONUS:
            now = tl.sum(x.to(tl.float32) * tl.load(bonus + h * D + tl.arange(0, D))[None, :] * keys.to(tl.float32), 1)
            xk = tl.where(t[:, None] == t[None, :], now[:, None], xk)
        if DELTA:
            xk = tl.dot(xb, N_, xk, input_precision=P)
            _put_tile(qb + i * (L * L), L, xb)
        _put_tile(A + i * (L * L), L, xk)


@triton.jit(do_not_specialize=["T", "chunks"])
def _factors(q, k, g, b, c, document, Q, K, J, W, w, N, M, qb, q_strides, k_strides, g_strides, b_strides, c_strides, d_stride,
             T, Hs, R, chunks, D: tl.constexpr, BD: tl.constexpr, VECTOR: tl.constexpr, BONUS: tl.constexpr,
             PARTS: tl.constexpr, Q_PARTS: tl.constexpr, P: tl.constexpr):
    """Q, K, J, W and w of a chunk, BD channels."""
    tiles: tl.constexpr = D // BD
    pid = tl.program_id(0)
    d0, n = pid % tiles * BD, pid // tiles % chunks
    batch, h, t0 = (pid // tiles // chunks // Hs).to(tl.int64), (pid // tiles // chunks % Hs).to(tl.int64), n * L
    i = (batch * Hs + h) * chunks + n
    DELTA: tl.constexpr = b is not None
    q += batch * q_strides[0] + h * R * q_strides[2]
    if g is not None:
        g += batch * g_strides[0] + h * g_strides[2]
    if document is not None:
        document += batch * d_stride
    own, live, last, through = _ends(document, t0, T)
    whole = tl.exp(tl.sum(_log_decays(g, t0, t0, T, g_strides[1], d0, BD, VECTOR), 0))
    if VECTOR:
        tl.store(w + i * D + d0 + tl.arange(0, BD), tl.where(through, whole, 0.0))
    else:
        tl.store(w + i + tl.arange(0, 1), tl.where(through, whole, 0.0))
    after = _after(g, t0, T, g_strides[1], last, d0, BD, VECTOR)
    to_end = _rows(k + batch * k_strides[0] + h * k_strides[2], t0, T, k_strides[1], d0, BD, D).to(tl.float32) * after
    if DELTA:
        x = _rows(c + batch * c_strides[0] + h * c_strides[2], t0, T, c_strides[1], d0, BD, D).to(tl.float32)
        x = x * _carry(g, t0, T, g_strides[1], live, d0, BD, VECTOR, True)
        W_ = tl.dot(_tile(M + i * (L * L), L), x, input_precision=P)
        _put_parts(W + i * (PARTS * L * D), d0, BD, D, PARTS, W_)
        x = _rows(b + batch * b_strides[0] + h * b_strides[2], t0, T, b_strides[1], d0, BD, D).to(tl.float32) * after
        _put_parts(J + i * (PARTS * L * D), d0, BD, D, PARTS, x)
        to_end = tl.dot(tl.trans(_tile(N + i * (L * L), L)), x, to_end, input_precision=P)
    _put_parts(K + i * (PARTS * L * D), d0, BD, D, PARTS, to_end)
    carry = _carry(g, t0, T, g_strides[1], live, d0, BD, VECTOR, BONUS)
    for r in range(R):
        x = _rows(q + r * q_strides[2], t0, T, q_strides[1], d0, BD, D).to(tl.float32) * carry
        i = ((batch * Hs + h) * R + r) * chunks + n
        if DELTA:
            x = tl.dot(_tile(qb + i * (L * L), L), W_, x, input_precision=P)
        _put_parts(Q + i * (Q_PARTS * L * D), d0, BD, D, Q_PARTS, x)


@triton.jit(do_not_specialize=["T", "chunks"])
def _walk(x, z, W, J, w, C0, C1, Cs, z_strides, T, Hs, chunks, Dv, Dp,
          D: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, VECTOR: tl.constexpr, REVERSE: tl.constexpr, PARTS: tl.constexpr):
    """C = w C + x^T z + J^T (W C), chunk after chunk, for a tile of value columns, and C before each: (10b), and with REVERSE (10')."""
    tiles = tl.cdiv(Dv, BV)
    pid = tl.program_id(0)
    batch, h, e0 = (pid // tiles // Hs).to(tl.int64), (pid // tiles % Hs).to(tl.int64), pid % tiles * BV
    state = batch * Hs + h
    DG: tl.constexpr = D if VECTOR else 1
    z += batch * z_strides[0] + h * R * z_strides[2]
    C = _state(C0 + state * D * Dv, e0, Dv, Dv, D, BV)
    for j in range(chunks):
        n = chunks - 1 - j if REVERSE else j
        i = state * chunks + n
        _put_state(Cs + i * D * Dp, e0, Dv, Dp, D, BV, C)
        decay = tl.load(w + i * DG + tl.arange(0, DG))[:, None]
        new = tl.where(decay > 0, C * decay, 0.0)
        if J is not None:
            u = _times(W + i * (PARTS * L * D), C, tl.zeros([L, BV], tl.float32), D, PARTS, False)
            new = _times(J + i * (PARTS * L * D), u, new, D, PARTS, True)
        for r in tl.static_range(R):
            rows = _rows(z + r * z_strides[2], n * L, T, z_strides[1], e0, BV, Dv)
            new = _times(x + ((state * R + r) * chunks + n) * (PARTS * L * D), rows, new, D, PARTS, True)
        C = new
    _put_state(C1 + state * D * Dv, e0, Dv, Dv, D, BV, C)


@triton.jit(do_not_specialize=["T", "chunks"])
def _outputs(A, Q, v, Cs, o, v_strides, o_strides, T, Hs, R, chunks, Dv, Dp, D: tl.constexpr, BV: tl.constexpr):
    """O (10) of a chunk and a query head; the heads of a state together."""
    pid = tl.program_id(0)
    head, n, batch = (pid % (Hs * R)).to(tl.int64), pid // (Hs * R) % chunks, (pid // (Hs * R) // chunks).to(tl.int64)
    h, t0 = head // R, n * L
    i = (batch * Hs * R + head) * chunks + n
    a, x = low(_tile(A + i * (L * L), L), v.dtype.element_ty), _tile(Q + i * (L * D), D)
    v += batch * v_strides[0] + h * v_strides[2]
    o += batch * o_strides[0] + head * o_strides[2]
    Cs += ((batch * Hs + h) * chunks + n) * D * Dp
    for e0 in range(0, Dv, BV):
        out = tl.dot(x, _state(Cs, e0, Dv, Dp, D, BV), input_precision="ieee")
        out = tl.dot(a, _rows(v, t0, T, v_strides[1], e0, BV, Dv), out, input_precision="ieee")
        _put_rows(o, t0, T, o_strides[1], e0, BV, Dv, out)


# ----------------------------------------------------------------------------- backward


@triton.jit(do_not_specialize=["T", "chunks"])
def _values(v, do, A, K, J, W, N, M, qb, Cs, dCs, u, y, dv, dw, v_strides, do_strides, dv_strides,
            T, Hs, R, chunks, Dv, Dp, D: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, P: tl.constexpr):
    """U, Y, dV and dw of a chunk."""
    batch, h, n = _program(chunks, Hs)
    i, t0 = (batch * Hs + h) * chunks + n, n * L
    DELTA: tl.constexpr = M is not None
    v += batch * v_strides[0] + h * v_strides[2]
    do += batch * do_strides[0] + h * R * do_strides[2]
    dv += batch * dv_strides[0] + h * dv_strides[2]
    total = tl.zeros([D], tl.float32)
    for e0 in range(0, Dv, BV):
        dC = _state(dCs + i * D * Dp, e0, Dv, Dp, D, BV)
        dV = tl.dot(_tile(K + i * (PARTS * L * D), D), dC, input_precision="ieee")
        if DELTA:
            dU = tl.dot(_tile(J + i * (PARTS * L * D), D), dC, input_precision="ieee")
        for r in range(R):
            dO = _rows(do + r * do_strides[2], t0, T, do_strides[1], e0, BV, Dv).to(tl.float32)
            j = ((batch * Hs + h) * R + r) * chunks + n
            dV = tl.dot(tl.trans(_tile(A + j * (L * L), L)), dO, dV, input_precision=P)
            if DELTA:
                dU = tl.dot(tl.trans(_tile(qb + j * (L * L), L)), dO, dU, input_precision=P)
        _put_rows(dv, t0, T, dv_strides[1], e0, BV, Dv, dV)
        if DELTA or dw is not None:
            C = _state(Cs + i * D * Dp, e0, Dv, Dp, D, BV)
        if dw is not None:
            total += tl.sum(C.to(tl.float32) * dC.to(tl.float32), 1)
        if DELTA:
            U = tl.dot(_tile(W + i * (PARTS * L * D), D), C, input_precision="ieee")
            V = _rows(v, t0, T, v_strides[1], e0, BV, Dv).to(tl.float32)
            U = tl.dot(_tile(N + i * (L * L), L), V, U, input_precision=P)
            _put_rows(u + i * L * Dp, 0, L, Dp, e0, BV, Dp, U)
            _put_rows(y + i * L * Dp, 0, L, Dp, e0, BV, Dp, tl.dot(tl.trans(_tile(M + i * (L * L), L)), dU, input_precision=P))
    if dw is not None:
        tl.store(dw + i * D + tl.arange(0, D), total)


@triton.jit(do_not_specialize=["T", "chunks"])
def _products(x, y, S, v, u, xs, ys, xv, xu, x_strides, y_strides, v_strides, T, Hs, R, chunks, Dv, Dp,
              D: tl.constexpr, BV: tl.constexpr):
    """Of the rows x, and y if given, of a chunk and one of R heads: xs = x S^T, ys = y S^T of the state S; if asked for x V^T, x U^T."""
    pid = tl.program_id(0)
    head, n, batch = (pid % (Hs * R)).to(tl.int64), pid // (Hs * R) % chunks, (pid // (Hs * R) // chunks).to(tl.int64)
    h, t0 = head // R, n * L
    i, j = (batch * Hs * R + head) * chunks + n, (batch * Hs + h) * chunks + n
    x += batch * x_strides[0] + head * x_strides[2]
    if y is not None:
        y += batch * y_strides[0] + head * y_strides[2]
    if xv is not None:
        v += batch * v_strides[0] + h * v_strides[2]
    of_x, of_y = tl.zeros([L, D], tl.float32), tl.zeros([L, D], tl.float32)
    with_v, with_u = tl.zeros([L, L], tl.float32), tl.zeros([L, L], tl.float32)
    for e0 in range(0, Dv, BV):
        X, C = _rows(x, t0, T, x_strides[1], e0, BV, Dv), tl.trans(_state(S + j * D * Dp, e0, Dv, Dp, D, BV))
        of_x = tl.dot(X, C, of_x, input_precision="ieee")
        if y is not None:
            of_y = tl.dot(_rows(y, t0, T, y_strides[1], e0, BV, Dv), C, of_y, input_precision="ieee")
        if xv is not None:
            with_v = tl.dot(X, tl.trans(_rows(v, t0, T, v_strides[1], e0, BV, Dv)), with_v, input_precision="ieee")
        if xu is not None:
            with_u = tl.dot(X, tl.trans(_rows(u + j * L * Dp, 0, L, Dp, e0, BV, Dv)), with_u, input_precision="ieee")
    _put_tile(xs + i * (L * D), D, of_x)
    if y is not None:
        _put_tile(ys + i * (L * D), D, of_y)
    if xv is not None:
        _put_tile(xv + i * (L * L), L, with_v)
    if xu is not None:
        _put_tile(xu + i * (L * L), L, with_u)


@triton.jit
def _sums(mask, x, VECTOR: tl.constexpr, P: tl.constexpr):
    """Row j: the sum of the rows t of x (L, COLS or 1) with mask_jt."""
    if VECTOR:
        return tl.dot(tl.where(mask, 1.0, 0.0), x, input_precision=P)
    else:
        return tl.sum(tl.where(mask, tl.trans(x), 0.0), 1)[:, None]


@triton.jit
def _over_channels(x, VECTOR: tl.constexpr):
    """(L, COLS) as the decays are: itself, or its sum (L, 1)."""
    if VECTOR:
        return x
    else:
        return tl.sum(x, 1)[:, None]


@triton.jit
def _passing(x, SHIFT: tl.constexpr, VECTOR: tl.constexpr, P: tl.constexpr):
    """Row j: what `_pair_gradients` gathered for the decay of step j."""
    t = tl.arange(0, L)
    if VECTOR and SHIFT:
        return _sums(t[:, None] + 1 == t[None, :], x, True, P)
    elif VECTOR:
        return x
    else:
        x = tl.dot(x, tl.where(t[:, None] < t[None, :], 1.0, 0.0), input_precision=P)  # (t, j): all s < j
        return tl.sum(tl.trans(tl.where(t[None, :] + SHIFT <= t[:, None], x, 0.0)), 1)[:, None]


@triton.jit
def _pair_gradients(x, keys, rows_b, E, dx, dk, db, dg, ak, ab, k, b, g, k_stride, b_stride, g_stride, own, document, t0, T, d0,
                    BD: tl.constexpr, VECTOR: tl.constexpr, SHIFT: tl.constexpr, DELTA: tl.constexpr, DECAY: tl.constexpr):
    """Adds what `_pair_matrices` asks of x, k and b given the gradients ak, ab of its matrices. Adds to dg: of decays per channel, in
    row j + SHIFT, what it asks of step j; per head, d log E_ts."""
    t = tl.arange(0, L)
    if VECTOR:
        S = tl.zeros([L, BD], tl.float32)
        x = x.to(tl.float32)
        for i in range(L):
            s = L - 1 - i
            S = tl.where((t > s + SHIFT)[:, None], S + _row(g, t0 + s + 1, T, g_stride, d0, BD), 0.0)
            e = tl.exp(S)
            seen = (t >= s + SHIFT) & (own == _document(document, t0 + s, T))
            here = (t == s)[:, None]
            column = tl.load(ak + t * L + s, mask=seen, other=0.0)[:, None] * e
            dk += tl.where(here, tl.sum(column * x, 0)[None, :], 0.0)
            asked = column * _row(k, t0 + s, T, k_stride, d0, BD)
            if DELTA:
                column = tl.load(ab + t * L + s, mask=seen, other=0.0)[:, None] * e
                db += tl.where(here, tl.sum(column * x, 0)[None, :], 0.0)
                asked += column * _row(b, t0 + s, T, b_stride, d0, BD)
            dx += asked
            if DECAY:  # all t >= j, for the j > s
                dg += tl.where((t > s + SHIFT)[:, None], tl.cumsum(x * asked, 0, reverse=True), 0.0)
    else:
        weight = tl.where(E > 0, E * _tile(ak, L), 0.0)
        if DECAY:
            dg += weight * tl.dot(x, tl.trans(keys), input_precision="ieee")
        weight = low(weight, x.dtype)
        dx = tl.dot(weight, keys, dx, input_precision="ieee")
        dk = tl.dot(tl.trans(weight), x, dk, input_precision="ieee")
        if DELTA:
            weight = tl.where(E > 0, E * _tile(ab, L), 0.0)
            if DECAY:
                dg += weight * tl.dot(x, tl.trans(rows_b), input_precision="ieee")
            weight = low(weight, x.dtype)
            dx = tl.dot(weight, rows_b, dx, input_precision="ieee")
            db = tl.dot(tl.trans(weight), x, db, input_precision="ieee")
    return dx, dk, db, dg


@triton.jit(do_not_specialize=["T", "chunks"])
def _local(q, k, g, b, c, bonus, document, q_, k_, b_, c_, qk, qb, ck, cb, dw, dq, dk, dg, db, dc, dbonus,
           q_strides, k_strides, g_strides, b_strides, c_strides, d_stride, dq_strides, dk_strides, dg_strides, db_strides, dc_strides,
           T, Hs, R, chunks, D: tl.constexpr, BD: tl.constexpr, VECTOR: tl.constexpr, P: tl.constexpr):
    """The gradients of a chunk's q, k, b, c, log_a and bonus, BD channels, from the products of `_values` and `_queries`.

    dg: per channel as log_a; per head (B, T, Hs, D / BD), a part of each tile.
    """
    tiles: tl.constexpr = D // BD
    pid = tl.program_id(0)
    d0, n = pid % tiles * BD, pid // tiles % chunks
    batch, h, t0 = (pid // tiles // chunks // Hs).to(tl.int64), (pid // tiles // chunks % Hs).to(tl.int64), n * L
    DELTA: tl.constexpr = b is not None
    BONUS: tl.constexpr = bonus is not None
    DECAY: tl.constexpr = dg is not None
    i = (batch * Hs + h) * chunks + n
    q += batch * q_strides[0] + h * R * q_strides[2]
    k += batch * k_strides[0] + h * k_strides[2]
    dq += batch * dq_strides[0] + h * R * dq_strides[2]
    dk += batch * dk_strides[0] + h * dk_strides[2]
    if g is not None:
        g += batch * g_strides[0] + h * g_strides[2]
    if document is not None:
        document += batch * d_stride
    t, d = tl.arange(0, L), d0 + tl.arange(0, BD)
    own, live, last, through = _ends(document, t0, T)
    after = _after(g, t0, T, g_strides[1], last, d0, BD, VECTOR)
    keys = _rows(k, t0, T, k_strides[1], d0, BD, D)
    new_k = _rows(k_ + i * (L * D), 0, L, D, d0, BD, D) * after
    into = new_k * keys.to(tl.float32)  # d log l_s
    rows_b, new_b, b_stride = keys, new_k, 0
    E, E1 = own, own
    if not VECTOR:
        if DELTA:
            E1 = _pair_decays(g, own, t0, T, g_strides[1], True, P)
        E = _pair_decays(g, own, t0, T, g_strides[1], BONUS, P)
    if DELTA:
        b += batch * b_strides[0] + h * b_strides[2]
        b_stride = b_strides[1]
        rows_b = _rows(b, t0, T, b_stride, d0, BD, D)
        new_b = _rows(b_ + i * (L * D), 0, L, D, d0, BD, D) * after
        into += new_b * rows_b.to(tl.float32)
    carry = _carry(g, t0, T, g_strides[1], live, d0, BD, VECTOR, BONUS)
    out = tl.zeros([L, BD], tl.float32)  # d log e_t, or of e-_t with a bonus
    pairs = tl.zeros([L, BD if VECTOR else L], tl.float32)
    if BONUS:
        u, new_bonus = tl.load(bonus + h * D + d)[None, :], tl.zeros([L, BD], tl.float32)
    for r in range(R):
        x = _rows(q + r * q_strides[2], t0, T, q_strides[1], d0, BD, D)
        j = ((batch * Hs + h) * R + r) * chunks + n
        new = _rows(q_ + j * (L * D), 0, L, D, d0, BD, D) * carry
        out += new * x.to(tl.float32)
        new, new_k, new_b, pairs = _pair_gradients(x, keys, rows_b, E, new, new_k, new_b, pairs, qk + j * (L * L),
                                                   qb + j * (L * L) if DELTA else qk, k, b, g, k_strides[1], b_stride, g_strides[1],
                                                   own, document, t0, T, d0, BD, VECTOR, BONUS, DELTA, DECAY)
        if BONUS:
            now, x = tl.load(qk + j * (L * L) + t * (L + 1))[:, None], x.to(tl.float32)
            new += now * keys.to(tl.float32) * u
            new_k += now * x * u
            new_bonus += now * x * keys.to(tl.float32)
        _put_rows(dq + r * dq_strides[2], t0, T, dq_strides[1], d0, BD, D, new)
    same, before = t[:, None] <= t[None, :], t[:, None] < t[None, :]  # (j, t): step t's e, or e-, has passed step j
    if DECAY:
        whole = tl.exp(tl.sum(_log_decays(g, t0, t0, T, g_strides[1], d0, BD, VECTOR), 0))
        whole = tl.where(through, whole * tl.load(dw + i * D + d), 0.0)[None, :]
        total = _over_channels(whole, VECTOR) + _sums(t[:, None] > t[None, :], _over_channels(into, VECTOR), VECTOR, P)
        total += _sums(before if BONUS else same, _over_channels(out, VECTOR), VECTOR, P) + _passing(pairs, BONUS, VECTOR, P)
    if DELTA:
        dc += batch * dc_strides[0] + h * dc_strides[2]
        db += batch * db_strides[0] + h * db_strides[2]
        x = _rows(c + batch * c_strides[0] + h * c_strides[2], t0, T, c_strides[1], d0, BD, D)
        new = _rows(c_ + i * (L * D), 0, L, D, d0, BD, D) * _carry(g, t0, T, g_strides[1], live, d0, BD, VECTOR, True)
        if DECAY:
            total += _sums(before, _over_channels(new * x.to(tl.float32), VECTOR), VECTOR, P)
        pairs = tl.zeros([L, BD if VECTOR else L], tl.float32)
        new, new_k, new_b, pairs = _pair_gradients(x, keys, rows_b, E1, new, new_k, new_b, pairs, ck + i * (L * L), cb + i * (L * L),
                                                   k, b, g, k_strides[1], b_stride, g_strides[1], own, document, t0, T, d0,
                                                   BD, VECTOR, True, True, DECAY)
        if DECAY:
            total += _passing(pairs, True, VECTOR, P)
        _put_rows(dc, t0, T, dc_strides[1], d0, BD, D, new)
        _put_rows(db, t0, T, db_strides[1], d0, BD, D, new_b)
    _put_rows(dk, t0, T, dk_strides[1], d0, BD, D, new_k)
    if BONUS:
        tl.store(dbonus + i * D + d, tl.sum(new_bonus, 0))
    if DECAY:
        dg += batch * dg_strides[0] + h * dg_strides[2]
        if VECTOR:
            _put_rows(dg, t0, T, dg_strides[1], d0, BD, D, total)
        else:
            tl.store(dg + pid % tiles + (t0 + t).to(tl.int64)[:, None] * dg_strides[1], total, mask=(t0 + t < T)[:, None])


# ----------------------------------------------------------------------------- autograd


class _Group:
    """The launches of a group of chunks: steps a to z of the inputs, and scratch."""

    def __init__(self, a, z, inputs, bonus, document, backward):
        self.q, self.k, self.v, self.g, self.b, self.c = (x if x is None else x[:, a:z] for x in inputs)
        q, k, g, b, c = self.q, self.k, self.g, self.b, self.c
        (B, self.T, H, D), Hs, self.Dv = q.shape, k.shape[2], self.v.shape[3]
        self.bonus, self.document = bonus, None if document is None else document[:, a : z + 1]
        self.n, self.Dp = triton.cdiv(self.T, 16), triton.cdiv(self.Dv, 16) * 16
        self.states, self.heads, self.vector = (B * Hs, self.n), (B * H, self.n), g is not None and g.ndim == 4
        self.sizes, self.P = (self.T, Hs, H // Hs, self.n), precision(q.element_size())
        self.in_strides = *map(strides, (q, k, g, b, c)), 0 if document is None else document.stride(0)
        delta, self.parts = b is not None, 1 if q.dtype == torch.float32 else 2
        q_parts = self.parts if backward else 1
        self.A = self.new(*self.heads, 16, 16)
        self.Q = self.new(*self.heads, q_parts, 16, D, dtype=q.dtype)
        self.K = self.new(*self.states, self.parts, 16, D, dtype=q.dtype)
        self.w = self.new(*self.states, D if self.vector else 1)
        self.J, self.W = (self.new(*self.states, self.parts, 16, D, dtype=q.dtype) if delta else None for _ in range(2))
        self.N, self.M = (self.new(*self.states, 16, 16) if delta else None for _ in range(2))
        self.qb = self.new(*self.heads, 16, 16) if delta else None
        _, warps, stages = config("pairs channel" if self.vector else "pairs", D, q.element_size())
        launch(_pairs, B * Hs * self.n, q, k, g, b, c, bonus, self.document, self.A, self.N, self.M, self.qb,
               *self.in_strides, *self.sizes, D, self.vector, self.P, num_warps=warps, num_stages=stages)
        BD, warps, stages = config("factors", D, q.element_size())
        launch(_factors, B * Hs * self.n * (D // BD), q, k, g, b, c, self.document, self.Q, self.K, self.J, self.W, self.w,
               self.N, self.M, self.qb, *self.in_strides, *self.sizes, D, BD, self.vector, bonus is not None,
               self.parts, q_parts, self.P, num_warps=warps, num_stages=stages)

    def new(self, *shape, dtype=torch.float32):
        return common.empty(shape, dtype, self.q.device)

    def walk(self, C0, C1, do=None):
        """From the state C0 to C1, which may be C0; with `do` their gradients backwards. Returns the states on the way."""
        T, Hs, R, n = self.sizes
        D, size = self.q.shape[3], self.q.element_size()
        Cs = self.new(*self.states, D, self.Dp, dtype=self.q.dtype)
        x, z, W, J, R = (self.K, self.v, self.W, self.J, 1) if do is None else (self.Q, do, self.J, self.W, R)
        BV, warps, stages = config("walk", D, size, R)
        launch(_walk, self.states[0] * triton.cdiv(self.Dv, BV), x, z, W, J, self.w, C0, C1, Cs, strides(z), T, Hs, n, self.Dv, self.Dp,
               D, BV, R, self.vector, do is not None, self.parts, num_warps=warps, num_stages=stages)
        return Cs

    def outputs(self, Cs, o):
        D = self.q.shape[3]
        BV, warps, stages = config("outputs", D, self.q.element_size())
        launch(_outputs, self.heads[0] * self.n, self.A, self.Q, self.v, Cs, o, strides(self.v), strides(o), *self.sizes,
               self.Dv, self.Dp, D, BV, num_warps=warps, num_stages=stages)

    def gradients(self, C0, do, dC1, dC0, dq, dk, dv, dg, db, dc):
        """Fills the d's of the group's steps and dC0, and returns the chunks' parts of dbonus, or None."""
        D, size, delta = self.q.shape[3], self.q.element_size(), self.b is not None
        Cs, dCs = self.walk(C0, self.new(*C0.shape)), self.walk(dC1, dC0, do)
        dw = None if dg is None else self.new(*self.states, D)
        u, y = (self.new(*self.states, 16, self.Dp, dtype=self.q.dtype) if delta else None for _ in range(2))
        BV, warps, stages = config("values", D, size)
        launch(_values, self.states[0] * self.n, self.v, do, self.A, self.K, self.J, self.W, self.N, self.M, self.qb, Cs, dCs, u, y, dv, dw,
               strides(self.v), strides(do), strides(dv), *self.sizes, self.Dv, self.Dp, D, BV, self.parts, self.P,
               num_warps=warps, num_stages=stages)
        if delta:  # the rows of all chunks: (B, 16 n, Hs, Dv)
            u, y = (x.view(*self.k.shape[::2], 16 * self.n, self.Dp).transpose(1, 2) for x in (u, y))

        def products(places, x, y, S, matrices=()):
            xs, ys = self.new(*places, 16, D), None if y is None else self.new(*places, 16, D)
            xv, xu = (self.new(*places, 16, 16) if m in matrices else None for m in "vu")
            BV, warps, stages = config("products", D, size)
            launch(_products, places[0] * self.n, x, y, S, self.v, u, xs, ys, xv, xu, strides(x), strides(y), strides(self.v),
                   self.T, Hs, places[0] // self.states[0], self.n, self.Dv, self.Dp, D, BV, num_warps=warps, num_stages=stages)
            return xs, ys, xv, xu

        Hs, all_ = self.sizes[1], "vu" if delta else "v"
        q_, _, qk, qb = products(self.heads, do, None, Cs, all_)
        k_, b_, _, _ = products(self.states, self.v, u, dCs)
        c_, _, ck, cb = products(self.states, y, None, Cs, all_) if delta else (None,) * 4
        dbonus = None if self.bonus is None else self.new(*self.states, D)
        BD, warps, stages = config("local", D, size)
        launch(_local, self.states[0] * self.n * (D // BD), self.q, self.k, self.g, self.b, self.c, self.bonus, self.document,
               q_, k_, b_, c_, qk, qb, ck, cb, dw, dq, dk, dg, db, dc, dbonus, *self.in_strides, *map(strides, (dq, dk, dg, db, dc)),
               *self.sizes, D, BD, self.vector, self.P, num_warps=warps, num_stages=stages)
        return dbonus


def _groups(k: Tensor, v: Tensor) -> list[tuple[int, int]]:
    """The first and last + 1 step of each group of chunks."""
    B, T, Hs, D = k.shape
    size = 16 * group(B * Hs, D, v.shape[3])
    return [(a, min(a + size, T)) for a in range(0, T, size)]


class _Delta(torch.autograd.Function):
    """Kept from the forward pass: the inputs and the state before each group of chunks."""

    @staticmethod
    def forward(ctx, q, k, v, g, b, c, bonus, state, document):
        (B, T, H, D), Hs, Dv = q.shape, k.shape[2], v.shape[3]
        keep, groups = any(ctx.needs_input_grad), _groups(k, v)
        o, C = common.empty((B, T, H, Dv), q.dtype, q.device), common.empty((B, Hs, D, Dv), torch.float32, q.device)
        before = common.empty((len(groups) if keep else 0, B, Hs, D, Dv), torch.float32, q.device)
        C.zero_() if state is None else C.copy_(state)
        with torch.cuda.device_of(q):
            for i, (a, z) in enumerate(groups):
                if keep:
                    before[i] = C
                part = _Group(a, z, (q, k, v, g, b, c), bonus, document, False)
                part.outputs(part.walk(C, C), o[:, a:z])
        ctx.save_for_backward(q, k, v, g, b, c, bonus, document, before)
        ctx.has_state = state is not None
        return o, C

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dC):
        q, k, v, g, b, c, bonus, document, before = ctx.saved_tensors
        (B, T, H, D), Hs = q.shape, k.shape[2]
        do, dC1 = dense(do), dC.contiguous()
        dq, dk, dv, db, dc = (None if x is None else common.empty(x.shape, x.dtype, x.device) for x in (q, k, v, b, c))
        dg = None
        if ctx.needs_input_grad[3]:
            dg = common.empty(g.shape if g.ndim == 4 else (B, T, Hs, D // config("local", D, q.element_size())[0]),
                              g.dtype if g.ndim == 4 else torch.float32, g.device)
        dC0 = common.empty(dC1.shape, torch.float32, q.device)
        dbonus = None if bonus is None else bonus.new_zeros(Hs, D)
        with torch.cuda.device_of(q):
            for i, (a, z) in reversed(list(enumerate(_groups(k, v)))):
                part = _Group(a, z, (q, k, v, g, b, c), bonus, document, True)
                part = part.gradients(before[i], do[:, a:z], dC1, dC0, *(x if x is None else x[:, a:z] for x in (dq, dk, dv, dg, db, dc)))
                dC1 = dC0
                if bonus is not None:
                    dbonus += part.view(B, Hs, -1, D).sum((0, 2))
        if dg is not None and g.ndim == 3:
            dg = dg.sum(-1).to(g.dtype)
        return dq, dk, dv, dg, db, dc, dbonus, dC1 if ctx.has_state else None, None


def scan(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor | None = None, *, state: Tensor | None = None,
         segment: Tensor | None = None, bonus: Tensor | None = None):
    """reference.scan (8) on CUDA, or anywhere under TRITON_INTERPRET=1.

    q (B, T, H, D), k (B, T, Hs, D), v (B, T, Hs, Dv) of one dtype, float32, float16 or bfloat16; log_a (B, T, Hs, D), (B, T, Hs) or
    None, of that dtype or float32, at most 0; bonus (Hs, D); state (B, Hs, D, Dv) in float32; segment (B, T). Returns o (B, T, H, Dv) in q's
    dtype and the state in float32. All float inputs have gradients. Raises ValueError for what the kernels do not do.

    Memory: kept for the backward pass, besides the inputs, a float32 state per `group` of chunks of 16 steps. Scratch of a group, of
    each chunk and state head: a state in q's dtype (backwards two), and the chunk's factors and products. In half precision with
    D = Dv = 128 and R = 1, the states of 2^26 numbers are 128 MiB (256 backwards), all scratch about 0.26 GB (0.6 GB) for `delta`.
    """
    return _linear("scan", q, k, v, log_a, None, None, state, segment, bonus)


def delta(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor | None, b: Tensor, c: Tensor, *, state: Tensor | None = None,
          segment: Tensor | None = None):
    """reference.delta (9) on CUDA: as `scan`; b, c (B, T, Hs, D) of q's dtype."""
    return _linear("delta", q, k, v, log_a, b, c, state, segment, None)


def _linear(op, q, k, v, log_a, b, c, state, segment, bonus):
    check(op, q, k, v, log_a, b, c, state, segment, bonus)
    q, k, v, b, c = map(dense, (q, k, v, b, c))
    log_a = dense(log_a) if log_a is not None and log_a.ndim == 4 else log_a
    document = None if segment is None else F.pad(_starts(segment).cumsum(1), (1, 0)).int()   # the state's own document is 0
    return _Delta.apply(q, k, v, log_a, b, c, None if bonus is None else bonus.float().contiguous(), state, document)


def check(op, q, k, v, log_a, b, c, state, segment, bonus):
    """ValueError, one line by name, for what the kernels do not do."""
    def need(holds, message):
        common.need(op, holds, message)

    need(q.ndim == 4 and k.ndim == 4 and v.ndim == 4, f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must be "
         "(batch, time, heads, head dim)")
    B, T, H, D = q.shape
    Hs, Dv = k.shape[2], v.shape[3]
    need(D in DIMS, f"head dim {D}: 16, 32, 64, 128 or 256")
    need(q.dtype in DTYPES, f"{q.dtype}: float32, float16 or bfloat16")
    need(k.shape == (B, T, Hs, D), f"k {tuple(k.shape)} must be {(B, T, Hs, D)}, as many steps and channels as q")
    need(v.shape == (B, T, Hs, Dv) and Dv, f"v {tuple(v.shape)} must be {(B, T, Hs, 'Dv')}")
    need(Hs and H % Hs == 0, f"{H} query heads are no multiple of {Hs} state heads")
    for name, x in dict(b=b, c=c).items():
        need((x is None) == (op == "scan") and (x is None or x.shape == k.shape), f"{name} must have k's shape {tuple(k.shape)}")
    need(log_a is None or log_a.shape in (k.shape, k.shape[:3]), f"log_a must be {tuple(k.shape)} or {tuple(k.shape[:3])}")
    need(bonus is None or bonus.shape == (Hs, D), f"bonus must be {(Hs, D)}")
    need(state is None or state.shape == (B, Hs, D, Dv), f"state must be {(B, Hs, D, Dv)}")
    need(segment is None or segment.shape == (B, T), f"segment must be {(B, T)}")
    for name, x in dict(k=k, v=v, b=b, c=c).items():
        need(x is None or x.dtype == q.dtype, f"{name} is {x is not None and x.dtype}, q is {q.dtype}: one dtype for all")
    need(log_a is None or log_a.dtype in (q.dtype, torch.float32), f"log_a is {log_a is not None and log_a.dtype}: q's dtype or float32")
    need(bonus is None or bonus.dtype in DTYPES, f"bonus is {bonus is not None and bonus.dtype}: float32, float16 or bfloat16")
    need(state is None or state.dtype == torch.float32, f"state is {state is not None and state.dtype}: float32")
    common.need_device(op, q, k=k, v=v, log_a=log_a, b=b, c=c, state=state, segment=segment, bonus=bonus)


# ----------------------------------------------------------------------------- machine code without a GPU

FORWARD = ("scan pairs", "scan factors", "scan walk", "scan outputs")  # "scan walk back" is the walk with `REVERSE`
HEADS = (1, 4, 8, 16)  # query heads a state that the table has


def launches(D: int, dtype: str):
    """Every way the ops launch a kernel at head dim D, for common.usage: (name, options, kernel, types, constants, warps, stages).
    The walk backwards unrolls its query heads: those in HEADS."""
    size, low = 4 if dtype == "fp32" else 2, "*" + dtype
    P, PARTS = precision(size), 1 if size == 4 else 2
    types = dict.fromkeys(("q", "k", "v", "g", "b", "c", "x", "y", "z", "o", "do", "dq", "dk", "dv", "db", "dc", "dg", "Cs", "dCs",
                           "u", "Q", "K", "J", "W", "x", "y", "S"), low)
    types |= dict.fromkeys(("A", "w", "N", "M", "qb", "C0", "C1", "q_", "k_", "b_", "c_", "qk", "ck", "cb", "xs", "ys",
                            "xv", "xu",
                            "dw", "bonus", "dbonus"), "*fp32")
    types |= dict.fromkeys(("T", "Hs", "R", "chunks", "Dv", "Dp", "d_stride"), "i32") | {"document": "*i32"}
    types |= {f"{x}_strides": "strides" for x in "q k v g b c x y z o do dq dk dv dg db dc".split()}
    delta = {"b", "c", "J", "W", "N", "M", "qb", "u", "y", "db", "dc", "b_", "c_", "ck", "cb"}

    def line(part, options, kernel, absent, constants, R=1, suffix="", **other):
        B, warps, stages = config(part, D, size, R)
        constants = {"D": D, "BV": B, "BD": B, "P": P, "PARTS": PARTS, "Q_PARTS": PARTS, **constants} | dict.fromkeys(absent)
        constants = {x: constants[x] for x in kernel.arg_names if x in constants}
        return f"scan {part.split()[0]}{suffix}", options, kernel, types | other, constants, warps, stages

    decays = {"none": {"g", "dg", "dw"}, "head": set(), "channel": set()}
    rules = {"": delta | {"bonus", "dbonus"}, " bonus": delta, " delta": {"bonus", "dbonus"}}
    for part, kernel in (("pairs", _pairs), ("factors", _factors), ("local", _local)):
        for decay, a in decays.items():
            for rule, c in rules.items():
                for packed, d in (("", {"document"}), (" packed", set())):
                    absent, constants = a | c | d, {"VECTOR": decay == "channel", "BONUS": rule == " bonus"}
                    scratch = {"dg": low if decay == "channel" else "*fp32"} if part == "local" else {}
                    name = "pairs channel" if part == "pairs" and decay == "channel" else part
                    if part == "factors" and packed:
                        yield line(name, decay + rule + " forward", kernel, absent, constants | {"Q_PARTS": 1})
                    yield line(name, decay + rule + packed, kernel, absent, constants, **scratch)
    for rule in ("", " delta"):
        absent = set() if rule else delta
        for vector in (False, True):
            yield line("walk", ("channel" if vector else "head") + rule, _walk, absent, {"VECTOR": vector, "R": 1, "REVERSE": False})
            for R in HEADS:
                yield line("walk", f"{'channel' if vector else 'head'}{rule} R {R}", _walk, absent,
                           {"VECTOR": vector, "R": R, "REVERSE": True}, R, " back")
        yield line("values", rule.strip() + " no decay", _values, absent | {"dw"}, {})
        yield line("values", rule.strip(), _values, absent, {})
        yield line("products", "q" + rule, _products, {"y", "ys"} | (set() if rule else {"u", "xu"}), {})
        yield line("products", "k" + rule, _products, {"xv", "xu"} | (set() if rule else {"y", "ys", "u"}), {})
    yield line("outputs", "", _outputs, set(), {})
