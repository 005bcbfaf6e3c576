"""fast.py: the ops of reference.py with the same names, signatures and results, faster.

Today: chunked, differentiable PyTorch for any device, the default for training. Equations carry
reference.py's numbers. The Triton kernels are not here yet (NOTES.md, "Open").

    attend   blocks of queries against the W + block keys they can see: linear in T at fixed W
    mlstm    chunks of C steps: inside a chunk a masked matrix, between chunks the state
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import reference
from reference import _is_top, _starts, check_loss, document_positions, mlstm_denominator, mlstm_state, quadratic

BLOCK = 64  # queries per block of `attend`, steps per chunk of `mlstm`
TILE = 2**24  # logits that `distill_loss` holds at a time, of student and of teacher


def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, *, window: int | None = None, keep: int = 0,
           segment: Tensor | None = None, q_keep: Tensor | None = None, return_lse: bool = False, return_peak: bool = False):
    """reference.attend, block by block: a block of queries reads only the keys its window can reach."""
    B, T, H, D = q.shape
    Hk, R = k.shape[2], H // k.shape[2]
    if sink is None and q_keep is None and not return_lse and not return_peak and (window is None or window >= T) and T > 1:
        same = None if segment is None else (_starts(segment).cumsum(1)[:, None, :, None] == _starts(segment).cumsum(1)[:, None, None]).tril()
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), same, is_causal=same is None,
                                           enable_gqa=H != Hk)
        return o.transpose(1, 2)
    W = T if window is None else min(window, T)
    C = min(T, max(BLOCK, W // 4))
    if T == 0 or W + C >= T:  # one block sees everything
        return reference.attend(q, k, v, sink, window=window, keep=keep, segment=segment, q_keep=q_keep, return_lse=return_lse, return_peak=return_peak)
    blocks = -(-T // C)
    reach = W - 1 + C  # keys that a block can see
    position = torch.arange(T, device=q.device).expand(B, T) if segment is None else document_positions(segment)

    def queries(x):  # (B, T, H, D) -> (B, blocks, Hk, R*C, D)
        x = F.pad(x, (0, 0, 0, 0, 0, blocks * C - T)).reshape(B, blocks, C, Hk, R, D)
        return x.permute(0, 1, 3, 4, 2, 5).reshape(B, blocks, Hk, R * C, D)

    def keys(x):  # (B, T, Hk, D) -> (B, blocks, Hk, D, reach)
        return F.pad(x, (0, 0, 0, 0, W - 1, blocks * C - T)).unfold(1, reach, C)

    # (1) on absolute indices: query c of block b is t = b*C + c, key j of block b is s = b*C + j - (W-1)
    c, j = torch.arange(C, device=q.device)[:, None], torch.arange(reach, device=q.device)[None]
    s = torch.arange(blocks, device=q.device)[:, None, None] * C + j - (W - 1)               # (blocks, 1, reach)
    mask = (((j >= c) & (j <= c + W - 1)) & (s >= 0))[None]                                  # (1, blocks, C, reach)
    document = None if segment is None else _starts(segment).cumsum(1)
    if document is not None:
        s_document = F.pad(document, (W - 1, blocks * C - T), value=-1).unfold(1, reach, C)
        t_document = F.pad(document, (0, blocks * C - T), value=-2).reshape(B, blocks, C)
        mask = mask & (t_document[..., None] == s_document[:, :, None])
    if keep:
        s_position = F.pad(position, (W - 1, blocks * C - T), value=keep).unfold(1, reach, C)
        mask = mask & (s_position >= keep)[:, :, None]
    scale = D**-0.5
    a = (queries(q) @ keys(k)) * scale                                                       # (B, blocks, Hk, R*C, reach)
    a = a.unflatten(3, (R, C)).masked_fill(~mask[:, :, None, None], -math.inf).flatten(3, 4)  # (2)
    if keep:
        sinks, k_sink, v_sink = _sink_mask(position, document, keep, blocks * C), k, v
        if document is None:
            sinks, k_sink, v_sink = sinks[:, :, :keep], k[:, :keep], v[:, :keep]
        b = (queries(q if q_keep is None else q_keep) @ k_sink.permute(0, 2, 3, 1)[:, None]) * scale
        sinks = sinks.unflatten(1, (blocks, C))
        b = b.unflatten(3, (R, C)).masked_fill(~sinks[:, :, None, None], -math.inf).flatten(3, 4)
        a = torch.cat([a, b], -1)
    lse = a.logsumexp(-1)                                                                    # (B, blocks, Hk, R*C)
    p = (a - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    o = p[..., :reach] @ keys(v).transpose(-1, -2)
    if keep:
        o = o + p[..., reach:] @ v_sink.transpose(1, 2)[:, None]

    def sequence(x):  # (B, blocks, Hk, R*C, ...) -> (B, T, H, ...)
        x = x.unflatten(3, (R, C)).movedim(4, 2)  # (B, blocks, C, Hk, R, ...)
        return x.reshape(B, blocks * C, H, *x.shape[5:])[:, :T]

    o, lse = sequence(o), sequence(lse)
    if sink is not None:
        o = o * torch.sigmoid(lse - sink).masked_fill(lse == -math.inf, 0)[..., None]        # (3)
    return (o, lse, sequence(a.amax(-1))) if return_peak else (o, lse) if return_lse else o


def _sink_mask(position: Tensor, document: Tensor | None, keep: int, rows: int) -> Tensor:
    """(B, rows, T) bool: key s is a sink of query t's document, at or before t. Rows past T see nothing."""
    B, T = position.shape
    index = torch.arange(T, device=position.device)
    mask = (position < keep)[:, None] & (index[:, None] >= index)
    if document is not None:
        mask = mask & (document[:, :, None] == document[:, None])
    return F.pad(mask, (0, 0, 0, rows - T))


def mlstm(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, *, state: tuple[Tensor, ...] | None = None,
          segment: Tensor | None = None, normalizer: str = "floor", scale: float | None = None, m0: float = 0.0):
    """reference.mlstm, chunk by chunk. With F the running sum of logsigmoid(f) inside a chunk, (4) unrolls to

        m_t = max(F_t + m_0, max_{s<=t} F_t - F_s + i_s)                                    (4')
        o_t = [sum_{s<=t} e^{F_t - F_s + i_s - m_t} (q_t . k_s) v_s + e^{F_t + m_0 - m_t} C_0^T q_t] / (7)   (6')

    and the state at the chunk's end is (6') without q. Every exponent is <= 0 and masked before exp.
    """
    if normalizer not in ("floor", "plain"):
        raise ValueError(f"normalizer {normalizer!r}: 'floor' or 'plain'")
    B, T, H, D = q.shape
    Hs = k.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    q = (q.to(dtype) * (D**-0.5 if scale is None else scale)).reshape(B, T, Hs, H // Hs, D).permute(0, 2, 3, 1, 4)
    k, v = k.to(dtype).transpose(1, 2), v.to(dtype).transpose(1, 2)                          # (B, Hs, T, D)
    i, log_f = i.to(dtype).transpose(1, 2), F.logsigmoid(f.to(dtype)).transpose(1, 2)        # (B, Hs, T)
    C, n, m = mlstm_state(B, Hs, D, m0=m0, dtype=dtype, device=q.device) if state is None else state
    document = None if segment is None else _starts(segment).cumsum(1)                       # (B, T), 0 at first
    out = []
    for a in range(0, T, BLOCK):
        b = min(a + BLOCK, T)
        q_, k_, v_, i_ = q[:, :, :, a:b], k[:, :, a:b], v[:, :, a:b], i[:, :, a:b]
        Fs = log_f[:, :, a:b].cumsum(-1)
        causal = torch.ones(b - a, b - a, dtype=torch.bool, device=q.device).tril()
        old = Fs + m[..., None]                                                              # exponent of the old state
        if document is not None:
            d = document[:, None, a:b]
            before = 0 if a == 0 else document[:, None, a - 1 : a]
            causal = causal & (d[..., None] == d[..., None, :])
            fresh = d != before  # the state before this chunk belongs to another document; an empty one has m0
            since = torch.where(causal, log_f[:, :, None, a:b], 0).sum(-1)
            old = torch.where(fresh, since + m0, old)
        # F_t - F_s summed step by step: a difference of two running sums loses what a strong decay swallows
        steps = causal.tril(-1)
        between = torch.where(steps, log_f[:, :, a:b, None], 0).cumsum(-2)
        e = (between + i_[..., None, :]).masked_fill(~causal, -math.inf)
        m_ = torch.maximum(old, e.amax(-1))                                                  # (4')
        shift = m_.masked_fill(m_ == -math.inf, 0)
        decay, carry = (e - shift[..., None]).exp(), (old - shift).exp()
        if document is not None:
            carry = carry.masked_fill(fresh, 0)
        s = (q_ @ k_[:, :, None].transpose(-1, -2)) * decay[:, :, None]                      # (B, Hs, R, C, C)
        num = s @ v_[:, :, None] + carry[:, :, None, :, None] * (q_ @ C[:, :, None])         # (6')
        den = s.sum(-1) + carry[:, :, None] * (q_ @ n[:, :, None, :, None])[..., 0]
        den = mlstm_denominator(den, m_[:, :, None], normalizer)
        out.append(num / den[..., None])                                                     # (7)
        w, c = decay[..., -1, :], carry[..., -1]                                             # the last row is the new state
        C = c[..., None, None] * C + (k_ * w[..., None]).transpose(-1, -2) @ v_
        n = c[..., None] * n + (k_ * w[..., None]).sum(-2)
        m = m_[..., -1]
    o = torch.cat(out, 3) if out else q.new_zeros(B, Hs, H // Hs, 0, D)
    return o.permute(0, 3, 1, 2, 4).reshape(B, T, H, D), (C, n, m)


def scan(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor | None = None, *, state: Tensor | None = None,
         segment: Tensor | None = None, bonus: Tensor | None = None):
    """reference.scan, chunk by chunk: (8)."""
    return _chunked(q, k, v, log_a, None, None, state, segment, bonus)


def delta(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor | None, b: Tensor, c: Tensor, *, state: Tensor | None = None,
          segment: Tensor | None = None):
    """reference.delta, chunk by chunk: (9), (10)."""
    return _chunked(q, k, v, log_a, b, c, state, segment, None)


def _chunked(q, k, v, log_a, b, c, state, segment, bonus):
    """reference.quadratic inside a chunk, the state between chunks."""
    T = q.shape[1]
    starts = None if segment is None else _starts(segment)
    size = BLOCK // 8 if log_a is not None and log_a.ndim == 4 else BLOCK if b is None else BLOCK // 4  # measured on a CPU
    out = []
    for a in range(0, max(T, 1), size):
        if starts is not None and a:
            state = state.masked_fill(starts[:, a, None, None, None], 0)
        part = (x if x is None else x[:, a : a + size] for x in (q, k, v, log_a, b, c))
        o, state = quadratic(*part, state=state, segment=None if segment is None else segment[:, a : a + size], bonus=bonus)
        out.append(o)
    return torch.cat(out, 1), state


def distill_loss(hidden: Tensor, weight: Tensor, target, labels: Tensor | None = None, *, ce: float = 0.0,
                 temperature: float = 1.0) -> Tensor:
    """reference.distill_loss, slice by slice of the vocabulary: nothing of size M x V in float32. Two passes over the slices:
    the first adds up each token's log sum exp and its divergence, the second makes from them

        dL/dz = (1-ce) tau (q - p) + ce (q_1 - [label]), over M                             (13')

    and adds dz W to hidden's gradient; a slice of W has the whole of its own, dz^T hidden. What fits one slice is the plain loss.
    """
    check_loss(ce, temperature, labels)
    M, V = len(hidden), len(weight)
    if M * V <= TILE:
        return reference.distill_loss(hidden, weight, target, labels, ce=ce, temperature=temperature)
    return _Distill.apply(hidden, weight, target, labels, ce, temperature)


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, labels, ce, tau):
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
        d_hidden = torch.zeros(hidden.shape, **new) if hidden.requires_grad else None
        d_weight = torch.empty_like(weight) if weight.requires_grad else None
        if hidden.requires_grad or weight.requires_grad:
            for s in slices:                                                                 # (13')
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
                dz = dz.div_(M).to(weight.dtype)
                if d_hidden is not None:
                    d_hidden += dz @ weight[s]
                if d_weight is not None:
                    d_weight[s] = dz.T @ hidden
        ctx.save_for_backward(None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight)
        return loss

    @staticmethod
    def backward(ctx, grad):
        d_hidden, d_weight = ctx.saved_tensors
        return (*(None if d is None else d * grad.to(d.dtype) for d in (d_hidden, d_weight)), None, None, None, None)
