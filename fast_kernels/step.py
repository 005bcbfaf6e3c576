"""One token's attend_step, mlstm_step and bifocal_step of reference.py: one kernel, one launch, nothing on the host depends on data.

A unit is a state head, or without a state a key/value head. A program does one tile of value columns of one unit's query heads: it
reads all keys, but only its columns of the values and of C, so o needs no sum over programs. With U = min(p + 1, N + W) for the token
p, the slots 0 to U - 1 hold tokens. The online softmax begins with the token itself, from registers:

    a_p = q . k_p / sqrt(D),   o = v_p,   l = 1;   then the slots s < U without p's own                                       (2)

Races. p's own slot is written, by the unit's tiles of the first unit of a key/value head, and read by no program of the launch.
A tile of C belongs to one program. n and m are read by all tiles of a unit and written by one: the last to arrive at a counter.
    Each program loads n and m, meets its threads at a barrier, then adds 1 with acq_rel: every load of n and m happens before the
    add, the adds of a unit are ordered, so they all happen before the last one, and that before its program's writes. All tiles compute
    the same bits, whichever is last. The last one sets the counter back to 0, nobody else touches it in this launch, and the next
    launch, also of a replayed graph, begins after this one has ended. No program waits for another, so any number may be resident.
    A counter is chosen by the address of m: two launches that share it share m, so whoever runs them side by side has lost anyway.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import common
from .attend import LN2, LOG2E, _sigmoid
from .common import DIMS, DTYPES, dense, launch, strides

KEPT_BLOCK = 16  # sink slots a step: the smallest side of tl.dot
HEADS = 16  # most query heads of a unit: one side of tl.dot
PROGRAMS = 96  # fewer programs than this are cut into smaller tiles
TINY = tl.constexpr(2.0**-126)


def config(part: str, D: int, size: int, units: int = 1) -> tuple[int, int, int, int]:
    """Value columns a tile, keys a block, warps and stages of "near", "far" or "both" by head dim, bytes of a dot's element and units."""
    BV = min(D, 128 if part == "near" else 32)
    while BV > 16 and units * (D // BV) < PROGRAMS:  # 16 columns of bfloat16 are a sector of memory
        BV //= 2
    if size == 4:  # no tensor cores
        return BV, 32 if D <= 64 else 16, 8, 1
    return BV, 64 if D == 256 else 128, 8, 1 if part == "far" else 3 if BV > 32 else 4


# ----------------------------------------------------------------------------- parts of the kernel


@triton.jit
def _heads(x, row, stride, r, P, D: tl.constexpr):
    """The heads r of x, whose first is `row`: (len(r), D), zeros from the head P on."""
    return tl.load(x + row + r.to(tl.int64)[:, None] * stride + tl.arange(0, D)[None, :], mask=(r < P)[:, None], other=0.0)


@triton.jit
def _if(flag, like):
    """The scalar flag as a mask of the shape of `like`, made by a comparison of blocks: the interpreter cannot spread a scalar one."""
    return like * 0 + tl.where(flag, 1, 0) == 1


@triton.jit
def _near_slots(acc, l, m, q, keys, values, k_stride, v_stride, lo, hi, slot, c, BN: tl.constexpr, BV: tl.constexpr, D: tl.constexpr):
    """The online softmax over the slots lo to hi but `slot`: acc = sum 2^(x - m) v, l = sum 2^(x - m), m = max x, x = a log2(e)."""
    for s0 in range(lo, hi, BN):
        s = s0 + tl.arange(0, BN)
        seen, at = (s < hi) & (s != slot), s.to(tl.int64)[:, None]
        k = tl.load(keys + at * k_stride + tl.arange(0, D)[None, :], mask=seen[:, None], other=0.0)
        v = tl.load(values + at * v_stride + tl.arange(0, BV)[None, :], mask=seen[:, None], other=0.0)
        x = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * c                       # (2)
        x = tl.where(seen[None, :], x, float("-inf"))
        new = tl.maximum(m, tl.max(x, 1))
        p, decay = tl.exp2(x - new[:, None]), tl.exp2(m - new)
        l = l * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
        m = new
    return acc, l, m


@triton.jit
def _logsigmoid(x):
    """min(x, 0) - log(1 + e^-|x|), the logarithm exact also where e^-|x| is lost in the 1."""
    e = tl.exp(-tl.abs(x))
    u = 1 + e
    lost = u == 1
    return tl.minimum(x, 0.0) - tl.where(lost, e, tl.log(u) * (e / tl.where(lost, 1.0, u - 1)))


# ----------------------------------------------------------------------------- kernel


@triton.jit(do_not_specialize=["units", "P", "R", "W", "N"])
def _step(q, q_keep, k, v, keys, values, position, sink, q_far, k_far, i, f, C, n, m, count, gate, o,
          q_strides, keep_strides, k_strides, v_strides, keys_strides, values_strides, q_far_strides, k_far_strides,
          units, P, R, W, N, scale, D: tl.constexpr, BP: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
          BK: tl.constexpr, PLAIN: tl.constexpr):
    """(2), (3) with q, keys and values; (4)-(7) with C; (11) with both, for a tile of a unit: P query heads, R units a key/value head."""
    NEAR: tl.constexpr = keys is not None
    FAR: tl.constexpr = C is not None
    TILES: tl.constexpr = D // BV
    tile = tl.program_id(0) % TILES
    u = (tl.program_id(0) // TILES % units).to(tl.int64)
    b = (tl.program_id(0) // TILES // units).to(tl.int64)
    h, d, e = u // R, tl.arange(0, D), tile * BV + tl.arange(0, BV)
    p = tl.zeros([], tl.int64) if position is None else tl.load(position + b)
    live = p >= 0
    new_v = tl.load(v + b * v_strides[0] + h * v_strides[2] + e)
    if FAR:  # asked for early, needed late
        unit = b * units + u
        C += unit * D * D + d[:, None] * D + e[None, :]
        state, norm, old = tl.load(C), tl.load(n + unit * D + d), tl.load(m + unit)
        write = tl.load(k_far + b * k_far_strides[0] + u * k_far_strides[2] + d).to(tl.float32)
        log_i, log_f = tl.load(i + unit).to(tl.float32), _logsigmoid(tl.load(f + unit).to(tl.float32))
    if NEAR:
        r = tl.arange(0, BP)
        dtype: tl.constexpr = keys.dtype.element_ty
        x = _heads(q, b * q_strides[0] + u * P * q_strides[2], q_strides[2], r, P, D)
        if x.dtype != dtype:
            x = x.to(tl.float32)
        new_k = tl.load(k + b * k_strides[0] + h * k_strides[2] + d).to(dtype)
        kept_v = new_v.to(dtype)
        slot = tl.where(p < N, p, N + (p - N) % W)
        end = tl.minimum(p + 1, N + W).to(tl.int32)
        keys += b * keys_strides[0] + h * keys_strides[2]
        values += b * values_strides[0] + h * values_strides[2] + tile * BV
        c = LOG2E / tl.sqrt(D * 1.0)
        own = x
        if q_keep is not None:
            y = _heads(q_keep, b * keep_strides[0] + u * P * keep_strides[2], keep_strides[2], r, P, D).to(x.dtype)
            own = tl.where(p < N, y, x)
        top = tl.sum(own.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * c
        l, acc = tl.full([BP], 1.0, tl.float32), tl.zeros([BP, BV], tl.float32) + kept_v.to(tl.float32)[None, :]
        begin = 0
        if q_keep is not None:
            acc, l, top = _near_slots(acc, l, top, y, keys, values, keys_strides[1], values_strides[1], 0, tl.minimum(N, end), slot, c,
                                      BK, BV, D)
            begin = N
        acc, l, top = _near_slots(acc, l, top, x, keys, values, keys_strides[1], values_strides[1], begin, end, slot, c, BN, BV, D)
        near = acc / l[:, None]
        if sink is not None:
            logit = tl.load(sink + u * P + r, mask=r < P, other=0.0).to(tl.float32)
            near = near * _sigmoid((top + tl.log2(l)) * LN2 - logit)[:, None]                        # (3)
    if FAR:
        log_f += old
        new = tl.maximum(log_f, log_i)                                                           # (4)
        shift = tl.where(new == float("-inf"), 0.0, new)
        f_, i_ = tl.exp(log_f - shift), tl.exp(log_i - shift)                                    # (5)
        norm = f_ * norm + i_ * write                                                            # (6)
        tl.debug_barrier()
        last = tl.atomic_add(count + unit, 1, sem="acq_rel", scope="gpu") == TILES - 1
        tl.store(n + unit * D + d, norm, mask=_if(last & live, d))
        tl.store(m + unit, new, mask=last & live)
        tl.store(count + unit, 0, mask=last)
        state = f_ * state + (i_ * write)[:, None] * new_v.to(tl.float32)[None, :]
        tl.store(C, state, mask=_if(live, d[:, None] + e[None, :]))
    if NEAR:
        first = live & (u % R == 0)
        tl.store(values + slot * values_strides[1] + tl.arange(0, BV), kept_v, mask=_if(first, e))
        tl.store(keys + slot * keys_strides[1] + d, new_k, mask=_if(first & (tile == 0), d))
    o += (b * units + u) * P * D
    if FAR:
        for r0 in range(0, P, BF):
            j = r0 + tl.arange(0, BF)
            read = _heads(q_far, b * q_far_strides[0] + u * P * q_far_strides[2], q_far_strides[2], j, P, D).to(tl.float32)
            num = tl.sum(read[:, :, None] * state[None, :, :], 1) * scale                          # (7)
            den = tl.sum(read * norm[None, :], 1) * scale
            if PLAIN:
                den += TINY
            else:
                den = tl.maximum(tl.abs(den), tl.maximum(tl.exp(-new), TINY))
            answer = num / den[:, None]
            if NEAR:
                mine = tl.sum(tl.where((j[:, None] == tl.arange(0, BP)[None, :])[:, :, None], near[None, :, :], 0.0), 1)
                g = tl.load(gate + (b * units + u) * P + j, mask=j < P, other=0.0).to(tl.float32)[:, None]
                answer = g * answer + (1 - g) * mine                                              # (11)
            answer = tl.where(live, answer, 0.0).to(o.dtype.element_ty)
            tl.store(o + j.to(tl.int64)[:, None] * D + e[None, :], answer, mask=(j < P)[:, None])
    else:
        y = tl.where(live, near, 0.0).to(o.dtype.element_ty)
        tl.store(o + r.to(tl.int64)[:, None] * D + e[None, :], y, mask=(r < P)[:, None])


# ----------------------------------------------------------------------------- counters

_zeros: dict[torch.device, tuple[Tensor, int]] = {}  # the newest block of counters and how many of it are given away
_counters: dict[tuple, Tensor] = {}


def counters(op: str, m: Tensor) -> Tensor:
    """An int32 for each head of m, 0 between launches, the same ones for the same memory. Blocks live for ever: graphs point to them."""
    key = m.device, m.data_ptr(), m.numel()
    if key not in _counters:
        block, used = _zeros.get(m.device, (None, 0))
        if block is None or used + m.numel() > len(block):
            capturing = m.is_cuda and torch.cuda.is_current_stream_capturing()
            common.need(op, not capturing, "new counters inside a CUDA graph: call it once on this state before the capture")
            block, used = torch.zeros(max(m.numel(), 2**16), dtype=torch.int32, device=m.device), 0
            if m.is_cuda:
                torch.cuda.current_stream(m.device).synchronize()  # any stream may be the first to use them
        _zeros[m.device] = block, used + triton.cdiv(m.numel(), 32) * 32
        _counters[key] = block[used : used + m.numel()]
    return _counters[key]


# ----------------------------------------------------------------------------- the ops


def _run(op, part, o, v, position, *, near=(None,) * 4, sink=None, q_keep=None, far=(None,) * 7, gate=None, keep=0, plain=False,
         scale=None):
    """One launch. near: q, k, keys, values; far: q_far, k_far, i, f, C, n, m."""
    q, k, keys, values = near
    q_far, k_far, i, f, C, n, m = far
    B, _, H, D = o.shape
    units = v.shape[2] if C is None else C.shape[1]
    P, size = H // units, 2 if part != "far" and q.dtype == keys.dtype != torch.float32 else 4
    BV, BN, warps, stages = config(part, D, size, B * units)
    flat = [None if x is None else x.contiguous() for x in (i, f, gate, sink, position)]
    i, f, gate, sink, position = flat
    q, q_keep, k, v, q_far, k_far = map(dense, (q, q_keep, k, v, q_far, k_far))
    with torch.cuda.device_of(o):
        launch(_step, D // BV * units * B, q, q_keep, k, v, keys, values, position, sink, q_far, k_far, i, f, C, n, m,
               None if C is None else counters(op, m), gate, o,
               *map(strides, (q, q_keep, k, v, keys, values, q_far, k_far)), units, P, units // v.shape[2],
               1 if keys is None else keys.shape[1] - keep, keep, D**-0.5 if scale is None else scale,
               D, *rows(part, P, D, BV), BV, BN, KEPT_BLOCK, plain, num_warps=warps, num_stages=stages)
    return o


def rows(part: str, P: int, D: int, BV: int) -> tuple[int, int]:
    """BP, of a dot, and BF, of a sum of products, for P query heads a unit."""
    P = triton.next_power_of_2(P)
    return max(16, P), 1 if part == "near" else min(P, max(1, 2**13 // (D * BV)), 4)


def attend_step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor, sink: Tensor | None = None, *,
                keep: int = 0, q_keep: Tensor | None = None) -> Tensor:
    """reference.attend_step on CUDA, or anywhere under TRITON_INTERPRET=1: o (B, 1, H, D).

    q, q_keep (B, 1, H, D); k, v (B, 1, Hk, D) of the same dtype, float32, float16 or bfloat16; keys, values (B, N + W, Hk, D) of one of
    these, updated in place; position (B) int64, -1 = padded; sink (H). No gradients. Raises ValueError for what the kernel does not do.
    """
    check_near("attend_step", q, k, v, keys, values, position, sink, keep, q_keep)
    _no_grad("attend_step", q=q, k=k, v=v, keys=keys, values=values, sink=sink, q_keep=q_keep)
    o = common.empty(q.shape, q.dtype, q.device)
    return _run("attend_step", "near", o, v, position, near=(q, k, keys, values), sink=sink, q_keep=q_keep, keep=keep)


def mlstm_step(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, C: Tensor, n: Tensor, m: Tensor, *, position: Tensor | None = None,
               normalizer: str = "floor", scale: float | None = None) -> Tensor:
    """reference.mlstm_step on CUDA, or anywhere under TRITON_INTERPRET=1: o (B, 1, H, D) in float32.

    q (B, 1, H, D); k (B, 1, Hs, D); v (B, 1, Hs or fewer, D); i, f (B, 1, Hs), each float32, float16 or bfloat16; C (B, Hs, D, D),
    n (B, Hs, D), m (B, Hs) float32 and contiguous, updated in place; position (B) int64, -1 = padded. No gradients.
    Raises ValueError for what the kernel does not do.
    """
    check_far("mlstm_step", q, k, v, i, f, C, n, m, position, normalizer)
    _no_grad("mlstm_step", q=q, k=k, v=v, i=i, f=f, C=C, n=n, m=m)
    o = common.empty(q.shape, torch.float32, q.device)
    return _run("mlstm_step", "far", o, v, position, far=(q, k, i, f, C, n, m), plain=normalizer == "plain", scale=scale)


def bifocal_step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor, q_far: Tensor, k_far: Tensor, i: Tensor,
                 f: Tensor, C: Tensor, n: Tensor, m: Tensor, gate: Tensor, sink: Tensor | None = None, *, keep: int = 0,
                 q_keep: Tensor | None = None, normalizer: str = "floor", scale: float | None = None) -> Tensor:
    """reference.bifocal_step on CUDA, or anywhere under TRITON_INTERPRET=1: o (B, 1, H, D) in q's dtype, one launch.

    The arguments of `attend_step` and `mlstm_step` (q_far, k_far and the gates may have other dtypes than q); gate (B, 1, H).
    Raises ValueError for what the kernel does not do.
    """
    op = "bifocal_step"
    check_near(op, q, k, v, keys, values, position, sink, keep, q_keep)
    check_far(op, q_far, k_far, v, i, f, C, n, m, position, normalizer)
    _no_grad(op, q=q, k=k, v=v, keys=keys, values=values, q_far=q_far, k_far=k_far, i=i, f=f, C=C, n=n, m=m, gate=gate, sink=sink,
             q_keep=q_keep)
    common.need(op, q_far.shape == q.shape, f"q_far {tuple(q_far.shape)} must be q's {tuple(q.shape)}")
    common.need(op, gate.shape == q.shape[:3] and gate.dtype in DTYPES, f"gate must be {tuple(q.shape[:3])}, in a float dtype")
    common.need_device(op, q, q_far=q_far, gate=gate)
    o = common.empty(q.shape, q.dtype, q.device)
    return _run(op, "both", o, v, position, near=(q, k, keys, values), sink=sink, q_keep=q_keep, far=(q_far, k_far, i, f, C, n, m),
                gate=gate, keep=keep, plain=normalizer == "plain", scale=scale)


def _no_grad(op, **tensors):
    """ValueError if a gradient is expected of any."""
    for name, x in tensors.items():
        common.need(op, x is None or not (x.requires_grad and torch.is_grad_enabled()), f"{name} requires grad: use torch.no_grad()")


def _check_token(op, q, v, position):
    """What both sides share."""
    def need(holds, message):
        common.need(op, holds, message)

    need(q.ndim == 4 and q.shape[1] == 1, f"q {tuple(q.shape)} must be (batch, 1, heads, head dim)")
    B, _, H, D = q.shape
    need(D in DIMS, f"head dim {D}: 16, 32, 64, 128 or 256")
    need(q.dtype in DTYPES, f"{q.dtype}: float32, float16 or bfloat16")
    need(v.ndim == 4 and v.shape == (B, 1, v.shape[2], D), f"v {tuple(v.shape)} must be (batch, 1, heads, head dim) with q's sizes")
    need(v.shape[2] and H % v.shape[2] == 0, f"{H} query heads are no multiple of {v.shape[2]} key/value heads")
    need(position is None or position.shape == (B,) and position.dtype == torch.int64, f"position must be ({B},) of int64")
    return need


def check_near(op, q, k, v, keys, values, position, sink, keep, q_keep):
    """ValueError, one line by name, for a window that the kernel does not do."""
    need = _check_token(op, q, v, position)
    (B, _, H, D), Hk = q.shape, v.shape[2]
    need(position is not None, "position is missing")
    need(k.shape == v.shape, f"k {tuple(k.shape)} must be v's {tuple(v.shape)}")
    need(keys.ndim == 4 and keys.shape == (B, keys.shape[1], Hk, D), f"keys {tuple(keys.shape)} must be {(B, 'keep + window', Hk, D)}")
    need(values.shape == keys.shape, f"values {tuple(values.shape)} must be keys' {tuple(keys.shape)}")
    need(0 <= keep < keys.shape[1], f"keep {keep}: from 0 to {keys.shape[1] - 1}, a slot of the {keys.shape[1]} is the window's")
    need(H // Hk <= HEADS, f"{H // Hk} query heads a key/value head: at most {HEADS}")
    need(q_keep is None or q_keep.shape == q.shape, "q_keep must have q's shape")
    need(sink is None or sink.shape == (H,) and sink.dtype in DTYPES, f"sink must be ({H},), a logit per query head")
    for name, x in dict(k=k, v=v, q_keep=q_keep).items():
        need(x is None or x.dtype == q.dtype, f"{name} is {x is not None and x.dtype}, q is {q.dtype}: one dtype for all")
    need(keys.dtype in DTYPES, f"keys are {keys.dtype}: float32, float16 or bfloat16")
    need(values.dtype == keys.dtype, f"values are {values.dtype}, keys {keys.dtype}: one dtype for both")
    need(keys.stride(3) == values.stride(3) == 1, "keys and values are updated in place: their last stride must be 1")
    common.need_device(op, q, k=k, v=v, keys=keys, values=values, position=position, sink=sink, q_keep=q_keep)


def check_far(op, q, k, v, i, f, C, n, m, position, normalizer):
    """ValueError, one line by name, for a state that the kernel does not do."""
    need = _check_token(op, q, v, position)
    need(C.ndim == 4, f"C {tuple(C.shape)} must be (batch, state heads, head dim, head dim)")
    (B, _, H, D), Hs = q.shape, C.shape[1]
    need(normalizer in ("floor", "plain"), f"normalizer {normalizer!r}: 'floor' or 'plain'")
    need(Hs and H % Hs == 0, f"{H} query heads are no multiple of {Hs} state heads")
    need(Hs % v.shape[2] == 0, f"{Hs} state heads are no multiple of v's {v.shape[2]}")
    need(H // Hs <= HEADS, f"{H // Hs} query heads a state head: at most {HEADS}")
    for name, x, shape in (("k", k, (B, 1, Hs, D)), ("i", i, (B, 1, Hs)), ("f", f, (B, 1, Hs)), ("C", C, (B, Hs, D, D)),
                           ("n", n, (B, Hs, D)), ("m", m, (B, Hs))):
        need(x.shape == shape, f"{name} {tuple(x.shape)} must be {shape}")
    for name, x in dict(C=C, n=n, m=m).items():
        need(x.dtype == torch.float32, f"{name} is {x.dtype}: the state is float32")
        need(x.is_contiguous(), f"{name} is updated in place: it must be contiguous")
    need(k.dtype == q.dtype, f"k is {k.dtype}, q is {q.dtype}: one dtype for both")
    for name, x in dict(v=v, i=i, f=f).items():
        need(x.dtype in DTYPES, f"{name} is {x.dtype}: float32, float16 or bfloat16")
    common.need_device(op, q, k=k, v=v, i=i, f=f, C=C, n=n, m=m, position=position)


# ----------------------------------------------------------------------------- machine code without a GPU

FORWARD = ("attend_step", "mlstm_step", "bifocal_step")
PARTS = dict(zip(("near", "far", "both"), FORWARD))


def launches(D: int, dtype: str):
    """Every way the ops launch the kernel at head dim D, for common.usage: (name, options, kernel, types, constants, warps, stages).

    Options: query heads a unit; "fp32 q": float32 inputs on a cache of this dtype; "all": sink, q_keep.
    """
    near, far = ("q", "q_keep", "k", "keys", "values"), ("q_far", "k_far", "i", "f", "C", "n", "m", "count")
    for part, name in PARTS.items():
        for inputs in dict.fromkeys((dtype, "fp32")):
            size = 4 if "fp32" in (inputs, dtype) else 2
            for units in (1, *(PROGRAMS * 16 * 2**j // D for j in range(1, 4))):
                BV, BN, warps, stages = config(part, D, size, units)
                for P in (1, 2, 4, 16):
                    for full in (False, True):
                        off = set(near + ("sink", "gate")) if part == "far" else {"gate", *far} if part == "near" else set()
                        off |= set() if full else {"sink", "q_keep"}
                        BP, BF = rows(part, P, D, BV)
                        constants = {"D": D, "BP": BP, "BF": BF, "BV": BV, "BN": BN, "BK": KEPT_BLOCK, "PLAIN": False} | dict.fromkeys(off)
                        types = dict.fromkeys(_step.arg_names, "i32") | {x + "_strides": "strides" for x in
                                                                         ("q", "keep", "k", "v", "keys", "values", "q_far", "k_far")}
                        types |= dict.fromkeys(("q", "q_keep", "k", "v", "q_far", "k_far", "i", "f", "gate", "o"), "*" + inputs)
                        types |= dict.fromkeys(("keys", "values"), "*" + dtype) | dict.fromkeys(("C", "n", "m", "sink"), "*fp32")
                        types |= {"count": "*i32", "position": "*i64", "scale": "fp32"} | ({"o": "*fp32"} if part == "far" else {})
                        label = f"{P} heads" + ", fp32 q" * (inputs != dtype) + ", all" * full
                        yield name, label, _step, types, constants, warps, stages
