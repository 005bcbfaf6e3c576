"""fast.py: the ops of reference.py with the same names, signatures and results, faster.

Chunked, differentiable PyTorch, the default for training; on CUDA Triton kernels (fast_kernels/), which compute in the inputs' dtype with
float32 sums and states. Equations carry reference.py's numbers.

    attend         blocks of queries against the W + block keys they can see: linear in T at fixed W
    mlstm          chunks of C steps: inside a chunk a masked matrix, between chunks the state
    scan, delta    the same, for the other recurrences
    ..._step       one token, through the ring and the state
    distill_loss   slices of the vocabulary: never all logits

    python fast.py              # check every op against float64, then time it beside its peers: bench.py
    python fast.py --compile    # what every kernel uses of a GPU, without one
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math

import torch
import torch.nn.functional as F
from torch import Tensor

import reference
from reference import _is_top, _starts, check_heads, check_loss, document_positions, mlstm_denominator, mlstm_state, quadratic

BLOCK = 64  # queries per block of `attend`, steps per chunk of `mlstm`
GROUP = 2**20  # numbers that `mlstm` holds of each kind at a time: about what a core's cache takes
TILE = 2**24  # logits that `distill_loss` holds at a time, of student and of teacher


def _in_float32(op):
    """Under autocast an op computes in float32 all the same: its half-precision inputs are raised, its products are not lowered."""
    @functools.wraps(op)
    def call(q, *args, **kwargs):
        if not torch.is_autocast_enabled(q.device.type):
            return op(q, *args, **kwargs)

        def raised(x):
            return x.float() if torch.is_tensor(x) and x.dtype in (torch.float16, torch.bfloat16) else x
        with torch.autocast(q.device.type, enabled=False):
            return op(raised(q), *map(raised, args), **{name: raised(x) for name, x in kwargs.items()})
    return call


def _on_cuda(kernel, lowered: str):
    """On CUDA the op is `kernel` of that module of fast_kernels/, under autocast with its arguments called `lowered` in autocast's dtype;
    elsewhere the decorated PyTorch. Bound by name, so that both have one signature."""
    def decorate(op):
        op_in_float32, signature = _in_float32(op), inspect.signature(op)

        @functools.wraps(op)
        def call(q, *args, **kwargs):
            if not q.is_cuda:
                return op_in_float32(q, *args, **kwargs)
            given = signature.bind(q, *args, **kwargs)
            if torch.is_autocast_enabled("cuda"):
                dtype = torch.get_autocast_dtype("cuda")
                given.arguments |= {n: given.arguments[n].to(dtype) for n in lowered.split() if given.arguments.get(n) is not None}
            with torch.autocast("cuda", enabled=False):
                return kernel(*given.args, **given.kwargs)
        return call
    return decorate


def _kernel(module: str, name: str):
    """A kernel of fast_kernels/, imported when it is first called: importing fast.py needs no Triton."""
    def call(*args, **kwargs):
        return getattr(importlib.import_module(f"fast_kernels.{module}"), name)(*args, **kwargs)
    return call


def _scan_kernel(q, k, v, log_a=None, *, state=None, segment=None, bonus=None):
    """A decay per head goes by chunks of 64 steps, one per channel or a bonus by chunks of 16."""
    if bonus is None and (log_a is None or log_a.ndim == 3):
        return _kernel("chunkwise", "scan")(q, k, v, log_a, state=state, segment=segment)
    return _kernel("delta", "scan")(q, k, v, log_a, state=state, segment=segment, bonus=bonus)


@_on_cuda(_kernel("attend", "attend"), "q k v q_keep")
def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, *, window: int | None = None, keep: int = 0,
           segment: Tensor | None = None, q_keep: Tensor | None = None, return_lse: bool = False, return_peak: bool = False):
    """reference.attend, block by block: a block of queries reads only the keys its window can reach."""
    check_heads("attend", q, k, v)
    B, T, H, D = q.shape
    Hk, R = k.shape[2], H // k.shape[2]
    if sink is None and q_keep is None and not return_lse and not return_peak and (window is None or window >= T) and T > 1:
        document = None if segment is None else _starts(segment).cumsum(1)
        same = None if segment is None else (document[:, None, :, None] == document[:, None, None]).tril()
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), same, is_causal=same is None,
                                           enable_gqa=H != Hk)
        return o.transpose(1, 2)
    if T == 0:
        return reference.attend(q, k, v, sink, return_lse=return_lse, return_peak=return_peak)
    position = torch.arange(T, device=q.device).expand(B, T) if segment is None else document_positions(segment)
    document = None if segment is None else _starts(segment).cumsum(1)

    def queries(x):  # (B, T, H, D) -> (B, Hk, R, T, D)
        return x if x is None else x.unflatten(2, (Hk, R)).permute(0, 2, 3, 1, 4)

    def sequence(x):  # (B, Hk, R, T, ...) -> (B, T, H, ...)
        return x.permute(0, 3, 1, 2, *range(4, x.ndim)).flatten(2, 3)

    o, lse, peak = map(sequence, _Attend.apply(queries(q), k.transpose(1, 2), v.transpose(1, 2), queries(q_keep),
                                               T if window is None else min(window, T), keep, position, document))
    if sink is not None:
        o = o * torch.sigmoid(lse - sink).masked_fill(lse == -math.inf, 0)[..., None]        # (3)
    return (o, lse, peak) if return_peak else (o, lse) if return_lse else o


class _Attend(torch.autograd.Function):
    """Blocks of queries and the keys they can see. Kept from the forward pass: the inputs and lse. With p = e^{a - lse} and d for
    the gradient of the loss,

        d p_ts = d o_t . v_s,   d a_ts = p_ts (d p_ts - sum_j p_tj d p_tj + d lse_t)         (2')
        d q_t = sum_s d a_ts k_s / sqrt(D),   k alike,   d v_s = sum_t p_ts d o_t

    and the peak's own gradient goes to the first greatest score.
    """

    @staticmethod
    def blocks(T, W):
        """The first and last + 1 query of each block."""
        C = max(BLOCK, W // 4)
        return [(a, min(a + C, T)) for a in range(0, T, C)]

    @staticmethod
    def scores(q, q_keep, k, a, b, W, keep, position, document):
        """Of the queries a to b: the indices of kept keys (K), the first key of the window's range, and the masked scores
        (B, Hk, R, b-a, K + range)."""
        lo = max(0, a - W + 1)
        t, s = torch.arange(a, b, device=q.device)[:, None], torch.arange(lo, b, device=q.device)
        mask = ((s <= t) & (s > t - W))[None]                                                # (1)
        if document is not None:
            mask = mask & (document[:, a:b, None] == document[:, None, lo:b])
        x = (q[:, :, :, a:b].flatten(2, 3) @ k[:, :, lo:b].transpose(-1, -2)).unflatten(2, (-1, b - a))
        kept = s[:0]
        if keep:
            mask = mask & (position[:, None, lo:b] >= keep)
            kept = (position[:, :b] < keep).any(0).nonzero()[:, 0]
            sinks = (position[:, None, kept] < keep) & (kept <= t)                           # (B, b-a, K)
            if document is not None:
                sinks &= document[:, a:b, None] == document[:, None, kept]
                here = sinks.any(1).any(0)
                kept, sinks = kept[here], sinks[..., here]
            y = (q if q_keep is None else q_keep)[:, :, :, a:b].flatten(2, 3) @ k[:, :, kept].transpose(-1, -2)
            x, mask = torch.cat([y.unflatten(2, (-1, b - a)), x], -1), torch.cat([sinks, mask.expand(len(sinks), -1, -1)], -1)
        return kept, lo, (x * q.shape[-1] ** -0.5).masked_fill_(~mask[:, None, None], -math.inf)  # (2)

    @staticmethod
    def forward(ctx, q, k, v, q_keep, W, keep, position, document):
        *size, T, _ = q.shape
        o, lse, peak = q.new_empty(*size, T, v.shape[-1]), q.new_empty(*size, T), q.new_empty(*size, T)
        for a, b in _Attend.blocks(T, W):
            kept, lo, x = _Attend.scores(q, q_keep, k, a, b, W, keep, position, document)
            top = x.amax(-1)
            p = x.sub_(top.masked_fill(top == -math.inf, 0)[..., None]).exp_()
            total = p.sum(-1)
            keys = torch.cat([v[:, :, kept], v[:, :, lo:b]], 2) if len(kept) else v[:, :, lo:b]
            out = (p.flatten(2, 3) @ keys).view(*size, b - a, -1)
            o[:, :, :, a:b] = out / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]
            lse[:, :, :, a:b], peak[:, :, :, a:b] = top + total.log(), top
        ctx.save_for_backward(q, k, v, q_keep, lse, position, document)
        ctx.rest = W, keep
        return o, lse, peak

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dlse, dpeak):
        q, k, v, q_keep, lse, position, document = ctx.saved_tensors
        W, keep = ctx.rest
        T, scale = q.shape[3], q.shape[-1] ** -0.5
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        d_keep = None if q_keep is None else torch.zeros_like(q_keep)
        for a, b in _Attend.blocks(T, W):
            kept, lo, x = _Attend.scores(q, q_keep, k, a, b, W, keep, position, document)
            top = x.argmax(-1, keepdim=True)
            lse_ = lse[:, :, :, a:b]
            p = x.sub_(lse_.masked_fill(lse_ == -math.inf, 0)[..., None]).exp_()
            do_ = do[:, :, :, a:b].flatten(2, 3)

            def parts(y):  # the kept keys' columns, then the window's
                return (y[:, :, kept], slice(0, len(kept))), (y[:, :, lo:b], slice(len(kept), None))

            da = torch.cat([do_ @ y.transpose(-1, -2) for y, _ in parts(v)[not len(kept):]], -1).view(p.shape)
            da = da.sub_(((p * da).sum(-1) - dlse[:, :, :, a:b])[..., None]).mul_(p)  # (2')
            da.scatter_add_(-1, top, dpeak[:, :, :, a:b, None])
            p, da = p.flatten(2, 3), da.mul_(scale).flatten(2, 3)
            dv[:, :, lo:b] += p[..., len(kept):].transpose(-1, -2) @ do_
            dk[:, :, lo:b] += da[..., len(kept):].transpose(-1, -2) @ q[:, :, :, a:b].flatten(2, 3)
            dq[:, :, :, a:b] = (da[..., len(kept):] @ k[:, :, lo:b]).view(dq[:, :, :, a:b].shape)
            if len(kept):
                p, da = p[..., : len(kept)], da[..., : len(kept)]
                dv.index_add_(2, kept, p.transpose(-1, -2) @ do_)
                dk.index_add_(2, kept, da.transpose(-1, -2) @ (q if q_keep is None else q_keep)[:, :, :, a:b].flatten(2, 3))
                (dq if q_keep is None else d_keep)[:, :, :, a:b] += (da @ k[:, :, kept]).view(dq[:, :, :, a:b].shape)
        return dq, dk, dv, d_keep, None, None, None, None


@_on_cuda(_kernel("chunkwise", "mlstm"), "q k v")
def mlstm(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, *, state: tuple[Tensor, ...] | None = None,
          segment: Tensor | None = None, normalizer: str = "floor", scale: float | None = None, m0: float = 0.0):
    """reference.mlstm, chunk by chunk. With F the running sum of logsigmoid(f) inside a chunk, (4) unrolls to

        m_t = max(F_t + m_0, max_{s<=t} F_t - F_s + i_s)                                    (4')
        o_t = [sum_{s<=t} e^{F_t - F_s + i_s - m_t} (q_t . k_s) v_s + e^{F_t + m_0 - m_t} C_0^T q_t] / (7)   (6')

    and the state at the chunk's end is (6') without q. Every exponent is <= 0 and masked before exp.
    """
    check_heads("mlstm", q, k, v)
    B, T, H, D = q.shape
    Hs = k.shape[2]
    if T < 2 or normalizer not in ("floor", "plain"):
        return reference.mlstm(q, k, v, i, f, state=state, segment=segment, normalizer=normalizer, scale=scale, m0=m0)
    dtype = torch.promote_types(q.dtype, torch.float32)
    L = min(BLOCK, T)
    N = -(-T // L)  # chunks

    def split(x, value=0.0):  # (B, T, Hs, ...) -> (N, B, Hs, ..., L, D); the steps past T are padded ones
        x = F.pad(x.to(dtype), (0, 0) * (x.ndim - 2) + (0, N * L - T), value=value) if N * L > T else x.to(dtype)
        return x.unflatten(1, (N, L)).permute(1, 0, 3, *range(4, x.ndim), 2, *[x.ndim] * (x.ndim > 3)).contiguous()

    document = None if segment is None else _starts(segment).cumsum(1)                       # (B, T), 0 at first
    document = document if segment is None else F.pad(document[None], (0, N * L - T), mode="replicate")[0].unflatten(1, (N, L))
    state = mlstm_state(B, Hs, D, m0=m0, dtype=dtype, device=q.device) if state is None else state
    o, *state = _MLSTM.apply(split(q.unflatten(2, (Hs, H // Hs))), split(k), split(v), split(i, -math.inf),
                             split(F.logsigmoid(f.to(dtype))), *state, None if document is None else document.movedim(1, 0)[:, :, None],
                             normalizer, D**-0.5 if scale is None else scale, m0)
    return o.permute(1, 0, 4, 2, 3, 5).reshape(B, N * L, H, D)[:, :T].to(q.dtype), tuple(state)


class _MLSTM(torch.autograd.Function):
    """The chunks of `mlstm` and their gradients: a group of chunks at a time, all of it but the states in parallel. Kept from the
    forward pass: the inputs, o, and of every chunk e (scaled like q), s, den and the state before it.

    m scales numerator, denominator, floor and state alike, so o and C e^m do not depend on it: the backward pass takes each m
    as given, except that the m it hands out is the maximum (4') and C = (C e^m) e^-m. With d for the gradient of the loss,
    q scaled, s_ts = e_ts q_t.k_s, e_ts = e^{F_t - F_s + i_s - m_t}, c_t = e^{F_t + m_0 - m_t} and den as in (7):

        d num = d o / den,   d den = -(d o . o) / den where the floor is lower, else 0               (7')
        d s = d num v^T + d den,   d q_t = sum_s d s_ts e_ts k_s + c_t (C_0 d num_t + d den_t n_0),   k and v alike
        d log e_ts = d s_ts s_ts,   d log c_t = q_t . (that second term)
        d i_s = sum_t d log e_ts,   d log f_u = sum_{s < u <= t} d log e_ts + sum_{t >= u} d log c_t
    """

    @staticmethod
    def groups(q, k):
        """The first chunk and the last + 1 of each group, of q (N, B, Hs, R, L, D) and k (N, B, Hs, L, D)."""
        N, D, L = len(k), k.shape[-1], k.shape[-2]
        size = max(1, GROUP // (q[0, ..., 0].numel() * (L + D) + k[0, ..., 0, 0].numel() * D * D))
        return [(a, min(a + size, N)) for a in range(0, N, size)]

    @staticmethod
    def gates(i, g, m, document, before, m0):
        """Of a group: e (N, B, Hs, L, L), c (N, B, Hs, L), m (N, B, Hs, L), and `fresh` (N, B, 1, L): whose document began after the
        chunk's first state, or None. `before` (B, 1, 1) is the document of the step before. F_t - F_s is summed step by step: a
        difference of two running sums loses what a strong decay swallows."""
        N, L = len(i), i.shape[-1]
        seen, fresh = torch.ones(L, L, dtype=torch.bool, device=i.device).tril(), None
        if document is not None:
            seen = seen & (document[..., None] == document[..., None, :])
            fresh = document != torch.cat([before[None], document[:-1, ..., -1:]])
            since = torch.where(seen, g[..., None, :], 0).sum(-1) + m0                       # an empty state has m0
        e = torch.where(seen.tril(-1), g[..., None], 0).cumsum(-2).add_(i[..., None, :]).masked_fill_(~seen, -math.inf)
        greatest, old, starts = e.amax(-1), g.cumsum(-1), [m]
        for j in range(N):
            last = old[j, ..., -1] + starts[j]
            last = last if fresh is None else torch.where(fresh[j, ..., -1], since[j, ..., -1], last)
            starts.append(torch.maximum(last, greatest[j, ..., -1]))
        old = old + torch.stack(starts[:-1])[..., None]
        old = old if fresh is None else torch.where(fresh, since, old)
        m = torch.maximum(old, greatest)                                                     # (4')
        shift = m.masked_fill(m == -math.inf, 0)
        e, c = e.sub_(shift[..., None]).exp_(), (old - shift).exp()
        return e, c if fresh is None else c.masked_fill(fresh, 0), m, fresh

    @staticmethod
    def add_states(Cs, ns, c, steps):
        """From chunk to chunk, (C, n) += c times the one before, in place: `steps` are pairs (before, after) of indices, and the chunk."""
        for before, after, j in steps:
            Cs[after].addcmul_(c[j, ..., -1, None, None], Cs[before])
            ns[after].addcmul_(c[j, ..., -1, None], ns[before])

    @staticmethod
    def like(x):
        """Room for a tensor like x (N, B, Hs, ..., L, D) whose memory is (B, N, L, Hs, ..., D), as the op's own tensors are."""
        N, B, Hs, *R, L, D = x.shape
        return x.new_empty(B, N, L, Hs, *R, D).permute(1, 0, 3, *range(4, x.ndim - 1), 2, x.ndim - 1)

    @staticmethod
    def forward(ctx, q, k, v, i, g, C, n, m, document, normalizer, scale, m0):
        o, kept, keep = _MLSTM.like(q), [], any(ctx.needs_input_grad)
        for a, b in _MLSTM.groups(q, k):
            q_, k_, v_, i_, g_, d = (x if x is None else x[a:b] for x in (q, k, v, i, g, document))
            e, c, m_, fresh = _MLSTM.gates(i_, g_, m, d, None if d is None else _MLSTM.before(document, a), m0)
            N, last = len(k_), e[..., -1, :].clone()  # the weights of the new state
            w, e = last[..., None] * k_, e.mul_(scale)
            Cs, ns = C.new_empty(N + 1, *C.shape), torch.cat([n[None], (last[..., None, :] @ k_)[..., 0, :]])
            Cs[0] = C
            torch.matmul(w.transpose(-1, -2), v_, out=Cs[1:])
            _MLSTM.add_states(Cs, ns, c, [(j, j + 1, j) for j in range(N)])
            q_, whole = q_.flatten(3, 4), q_.shape                                           # (N, B, Hs, R*L, D), (.., R, L, D)
            s = (q_ @ k_.transpose(-1, -2)).view(*whole[:-1], -1).mul_(e[:, :, :, None])     # (N, B, Hs, R, L, L)
            c_q = (c * scale)[:, :, :, None]
            num = (q_ @ Cs[:-1]).view(whole).mul_(c_q[..., None]).add_((s.flatten(3, 4) @ v_).view(whole))  # (6')
            den = s.sum(-1).add_(torch.linalg.vecdot(q_, ns[:-1, :, :, None]).view(whole[:-1]).mul_(c_q))
            torch.div(num, mlstm_denominator(den, m_[:, :, :, None], normalizer)[..., None], out=o[a:b])  # (7)
            C, n, m = Cs[-1].clone(), ns[-1].clone(), m_[-1, ..., -1]
            if keep:
                kept += [e, last, c, m_, fresh, s, den, Cs, ns]
        ctx.save_for_backward(q, k, v, o, document, *kept)
        ctx.rest = normalizer, scale
        return o, C, n, m

    @staticmethod
    def before(document, a):
        """The document of the step before chunk a, (B, 1, 1); 0 at first."""
        return document[a - 1, ..., -1:] if a else torch.zeros_like(document[0, ..., -1:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dC, dn, dm):
        q, k, v, o, document, *kept = ctx.saved_tensors
        normalizer, scale = ctx.rest
        dq, dk, dv = map(_MLSTM.like, (q, k, v))
        di, dg = (q.new_empty(*k.shape[:4]) for _ in range(2))
        scratch = q.new_empty(0)

        def dot(x, y):  # over the last dim, through memory that is used again
            nonlocal scratch
            if len(scratch) < x.numel():
                scratch = x.new_empty(x.numel())
            return torch.mul(x, y, out=scratch[: x.numel()].view(x.shape)).sum(-1)

        dm = dm - (dC * kept[-2][-1]).sum((-1, -2)) - (dn * kept[-1][-1]).sum(-1)
        for group in (slice(*ends) for ends in reversed(_MLSTM.groups(q, k))):
            (e, last, c, m_, fresh, s, den, Cs, ns), kept = kept[-9:], kept[:-9]
            q_, k_, v_, o_, do_, d = (x if x is None else x[group] for x in (q, k, v, o, do, document))
            q_, whole = q_.flatten(3, 4), q_.shape
            d_num = torch.div(do_, mlstm_denominator(den, m_[:, :, :, None], normalizer)[..., None], out=q.new_empty(whole))  # (7')
            d_den = dot(d_num, o_).neg_()
            if normalizer == "floor":
                d_den = d_den * den.sign() * (den.abs() >= (-m_[:, :, :, None]).exp())
            d_num = d_num.flatten(3, 4)
            ds = (d_num @ v_.transpose(-1, -2)).view(s.shape).add_(d_den[..., None])
            de = (ds * s).sum(3)                                                             # d log e, (N, B, Hs, L, L)
            ds = ds.mul_(e[:, :, :, None]).flatten(3, 4)
            to_v, to_k = s.flatten(3, 4).transpose(-1, -2) @ d_num, ds.transpose(-1, -2) @ q_
            c_q = (c * scale)[:, :, :, None]
            c_num = d_num.view(whole).mul_(c_q[..., None]).view(d_num.shape)
            c_den = d_den.mul(c_q).view(*q_.shape[:-1], 1)                                   # (N, B, Hs, R*L, 1)
            old = (c_num @ Cs[:-1].transpose(-1, -2)).addcmul_(c_den, ns[:-1, :, :, None])
            dc = dot(q_, old).view(den.shape).sum(3)                                 # d log c, (N, B, Hs, L)
            torch.add(old.view(whole), (ds @ k_).view(whole), out=dq[group])
            # dC, dn after each chunk, then before the first
            N = len(q_)
            dCs, dns = torch.empty_like(Cs), torch.cat([(c_den.transpose(-1, -2) @ q_)[..., 0, :], dn[None]])
            dCs[-1] = dC
            torch.matmul(q_.transpose(-1, -2), c_num, out=dCs[:-1])
            _MLSTM.add_states(dCs, dns, c, [(j + 1, j, j) for j in reversed(range(N))])
            w = last[..., None]
            into = (v_ @ dCs[1:].transpose(-1, -2)).add_(dns[1:, :, :, None])                # what the new state asks of w k
            de[..., -1, :] += last * dot(k_, into)
            torch.add(to_k, into.mul_(w), out=dk[group])
            torch.add(to_v, (k_ @ dCs[1:]).mul_(w), out=dv[group])
            dc[..., -1] += c[..., -1] * (dot(Cs[:-1].flatten(-2), dCs[1:].flatten(-2)) + (ns[:-1] * dns[1:]).sum(-1))
            # the m handed on is the greatest exponent of a chunk's last row, or the old m (a document's m0) decayed
            top = last.argmax(-1, keepdim=True)
            decayed = last.gather(-1, top)[..., 0] < 1                                       # (N, B, Hs)
            passed = decayed if fresh is None else decayed & ~fresh[..., -1]
            dms = torch.cat([passed[1:], torch.ones_like(passed[:1])]).flip(0).cumprod(0).flip(0) * dm  # after each chunk
            de[..., -1, :].scatter_add_(-1, top, torch.where(decayed, 0, dms)[..., None])
            dg_ = F.pad(de.cumsum(-1).tril_(-1).sum(-2)[..., :-1], (1, 0))
            if fresh is not None:
                since = (d == d[..., -1:]) & fresh[..., -1:]
                dg_ += torch.where(since & decayed[..., None], dms[..., None], 0)
            dc[..., -1] += torch.where(passed, dms, 0)
            di[group] = de.sum(-2)
            dg[group] = dg_.add_(dc.flip(-1).cumsum(-1).flip(-1))
            dC, dn, dm = dCs[0], dns[0], torch.where(passed[0], dms[0], 0)
        return dq, dk, dv, di, dg, dC, dn, dc[0].sum(-1), None, None, None, None


@_on_cuda(_scan_kernel, "q k v")
def scan(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor | None = None, *, state: Tensor | None = None,
         segment: Tensor | None = None, bonus: Tensor | None = None):
    """reference.scan, chunk by chunk: (8)."""
    return _chunked(q, k, v, log_a, None, None, state, segment, bonus)


@_on_cuda(_kernel("delta", "delta"), "q k v b c")
def delta(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor | None, b: Tensor, c: Tensor, *, state: Tensor | None = None,
          segment: Tensor | None = None):
    """reference.delta, chunk by chunk: (9), (10)."""
    return _chunked(q, k, v, log_a, b, c, state, segment, None)


def _chunked(q, k, v, log_a, b, c, state, segment, bonus):
    """reference.quadratic inside a chunk, the state between chunks."""
    T = q.shape[1]
    if T < 2:
        return reference._recur(q, k, v, log_a, b, c, state, segment, bonus)
    starts = None if segment is None else _starts(segment)
    size = BLOCK // 8 if log_a is not None and log_a.ndim == 4 else BLOCK if b is None else BLOCK // 4  # measured on a CPU
    out = []
    for a in range(0, T, size):
        if starts is not None and a:
            state = state.masked_fill(starts[:, a, None, None, None], 0)
        part = (x if x is None else x[:, a : a + size] for x in (q, k, v, log_a, b, c))
        o, state = quadratic(*part, state=state, segment=None if segment is None else segment[:, a : a + size], bonus=bonus)
        out.append(o)
    return torch.cat(out, 1), state


# one token: PyTorch does it as reference.py does, on CUDA each is one launch
attend_step = _on_cuda(_kernel("step", "attend_step"), "q k v q_keep")(reference.attend_step)
mlstm_step = _on_cuda(_kernel("step", "mlstm_step"), "")(reference.mlstm_step)
bifocal_step = _on_cuda(_kernel("step", "bifocal_step"), "q k v q_keep")(reference.bifocal_step)


def distill_loss(hidden: Tensor, weight: Tensor, target, labels: Tensor | None = None, *, ce: float = 0.0,
                 temperature: float = 1.0) -> Tensor:
    """reference.distill_loss, slice by slice of the vocabulary: nothing of size M x V in float32. Two passes over the slices:
    the first adds up each token's log sum exp and its divergence, the second makes from them

        dL/dz = (1-ce) tau (q - p) + ce (q_1 - [label]), over M                             (13')

    and adds dz W to hidden's gradient; a slice of W has the whole of its own, dz^T hidden. What fits one slice is the plain loss.
    The gradients are made with the loss and handed out once: a second backward pass is refused.
    """
    check_loss(hidden, weight, target, labels, ce, temperature)
    M, V = len(hidden), len(weight)
    if M * V <= TILE:
        return reference.distill_loss(hidden, weight, target, labels, ce=ce, temperature=temperature)
    return _Distill.apply(hidden, weight, target, labels, ce, temperature, torch.is_grad_enabled())


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, labels, ce, tau, graded):
        M, V = len(hidden), len(weight)
        size = max(1, TILE // M)
        slices = [slice(a, min(a + size, V)) for a in range(0, V, size)]
        exact = torch.promote_types(hidden.dtype, torch.float32)
        top, new = _is_top(target), dict(dtype=exact, device=hidden.device)
        lse_q, lse_1, lse_p = (torch.full((M, 1), -math.inf, **new) for _ in range(3))
        cross, right = torch.zeros(M, 1, **new), torch.zeros(M, 1, **new)  # sum p (z_p - z_q) / tau, and the label's logit
        if top:
            values, indices = target
            log_p = (values.to(exact) / tau).log_softmax(-1)
            p, found = log_p.exp(), torch.zeros(M, values.shape[1], **new)

        def student(s):
            return (hidden @ weight[s].T).to(exact)

        def teacher(s):  # its logits over tau
            return (target[:, s] if torch.is_tensor(target) else target[0] @ target[1][s].T).to(exact) / tau

        def inside(index, s):  # which of the ids lie in the slice, and where
            return (index >= s.start) & (index < s.stop), (index - s.start).clamp(0, s.stop - s.start - 1)

        for s in slices:
            z = student(s)
            if ce:
                lse_1 = torch.logaddexp(lse_1, z.logsumexp(-1, keepdim=True))
                here, place = inside(labels[:, None], s)
                right = torch.where(here, z.gather(-1, place), right)
            if ce == 1:
                continue
            z = z.div_(tau)
            lse_q = torch.logaddexp(lse_q, z.logsumexp(-1, keepdim=True))
            if top:
                here, place = inside(indices, s)
                found = torch.where(here, z.gather(-1, place), found)
            else:
                y = teacher(s)
                lse = torch.logaddexp(lse_p, y.logsumexp(-1, keepdim=True))
                cross = cross * (lse_p - lse).exp() + ((y - lse).exp() * (y - z)).sum(-1, keepdim=True)
                lse_p = lse
        loss = torch.zeros((), **new)
        if ce < 1:
            kl = (p * (log_p - found)).sum(-1, keepdim=True) + lse_q if top else cross - lse_p + lse_q
            loss = (1 - ce) * tau**2 * kl.mean()                                             # (13)
        if ce:
            loss = loss + ce * (lse_1 - right).mean()
        d_hidden = torch.zeros(hidden.shape, **new) if graded and hidden.requires_grad else None
        d_weight = torch.empty_like(weight) if graded and weight.requires_grad else None
        if d_hidden is not None or d_weight is not None:
            for s in slices:                                                                 # (13'), M times
                z = student(s)
                dz = ce * (z - lse_1).exp() if ce else torch.zeros_like(z)
                if ce:
                    here, place = inside(labels[:, None], s)
                    dz.scatter_add_(1, place, -ce * here.to(exact))
                if ce < 1:
                    share = (1 - ce) * tau
                    dz += z.div_(tau).sub_(lse_q).exp_().mul_(share)
                    if top:
                        here, place = inside(indices, s)
                        dz.scatter_add_(1, place, torch.where(here, -share * p, 0))
                    else:
                        dz -= teacher(s).sub_(lse_p).exp_().mul_(share)
                dz = dz.to(weight.dtype)
                if d_hidden is not None:
                    d_hidden += dz @ weight[s]
                if d_weight is not None:
                    d_weight[s] = dz.T @ hidden
        ctx.made, ctx.to = (d_hidden, d_weight), (hidden.dtype, M)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        if ctx.made is None:
            raise RuntimeError("distill_loss: its gradients were handed out already; compute the loss again")
        (d_hidden, d_weight), ctx.made = ctx.made, None
        dtype, M = ctx.to
        if d_hidden is not None:
            d_hidden = d_hidden.mul_(grad / M).to(dtype)
        if d_weight is not None:  # in place, a second one does not fit beside it; in parts, for float16 would lose the scale itself
            for part in d_weight.split(max(1, TILE // d_weight.shape[1])):
                part.copy_(part.to(grad.dtype).mul_(grad / M))
        return d_hidden, d_weight, None, None, None, None, None


# ----------------------------------------------------------------------------- decoding


def decode_step(model, token: Tensor, cache):
    """A call that replaces token (B, 1) by the model's next one, greedily."""
    @torch.no_grad()
    def step():
        token.copy_(model.head(model.hidden(token, cache=cache)[:, -1]).argmax(-1, keepdim=True))
    return step


def decode_graph(model, token: Tensor, cache):
    """`decode_step`, on CUDA as one graph, captured here and replayed.

    token and the cache's tensors are the graph's own memory: write into them, never put others in their place. The steps of the
    capture are taken back.
    """
    step = decode_step(model, token, cache)
    if not token.is_cuda:
        return step
    tensors = [token, cache.seen, *(t for layer in cache.layers for t in layer.values())]
    saved = [t.clone() for t in tensors]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles the kernels
            step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        step()
    for t, old in zip(tensors, saved):
        t.copy_(old)
    return graph.replay


if __name__ == "__main__":
    import bench
    reference.cli(bench.main)
