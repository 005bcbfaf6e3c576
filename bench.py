"""bench.py: is fast.py right, and how fast? It checks every op against float64 of reference.py, stops if one fails, then times each beside
its peers. `python fast.py` runs it.

The rule for errors is `allowed`, for the tests too. The floor of an op is the greater of bytes / copy rate and operations / product rate,
both rates measured on this device in the same run. mlstm_kernels and fla have a state per query head: they get keys and values repeated.
"""

from __future__ import annotations

import json
import math
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor

import fast
import reference

FLOAT32 = 1e-5  # RMS(got - exact) / RMS(exact) that a float32 result may have
FLOAT64 = 1e-9


# ----------------------------------------------------------------------------- errors


def rms(x: Tensor) -> float:
    """Root mean square; 0 for no numbers."""
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def allowed(dtype: torch.dtype, exact: Tensor, same: Tensor | None = None, times: int = 2) -> float:
    """The RMS error a result may have: FLOAT64 or FLOAT32 of RMS(exact) by its dtype; or, if `same` is given, the same maths in
    that dtype by PyTorch, `times` the error of that: in half precision this is the only rule. The one place of tolerances."""
    budget = {torch.float64: FLOAT64, torch.float32: FLOAT32}.get(dtype, 0.0) * rms(exact)
    return budget if same is None else max(budget, times * rms(same.detach().double() - exact.double()))


def cast(x, dtype: torch.dtype, device=None):
    """A tensor, or each of a tuple: floats in dtype, on device; anything else as it is."""
    if isinstance(x, tuple):
        return tuple(cast(y, dtype, device) for y in x)
    return x.to(device, dtype if x.is_floating_point() else None) if torch.is_tensor(x) else x


def outputs_and_gradients(module, name: str, tensors: dict, options: dict, dtype: torch.dtype, device=None, rounding=torch.float64):
    """What an op of reference or fast gives, and the gradients of a fixed random loss of it with respect to all float tensors;
    those called C, n, m are the initial state. The loss's own gradient is rounded to `rounding` first."""
    leaves = {n: x.to(device, dtype).requires_grad_() for n, x in tensors.items()}
    arguments = {n: x for n, x in leaves.items() if n not in ("C", "n", "m")}
    if "C" in leaves:
        arguments["state"] = tuple(leaves[n] for n in "Cnm") if "n" in leaves else leaves["C"]
    out = getattr(module, name)(**arguments, **{n: cast(x, dtype, device) for n, x in options.items()})
    out = [out] if torch.is_tensor(out) else [x for part in out for x in (part if isinstance(part, tuple) else [part])]
    loss = sum((x * _normal(j, *x.shape).to(rounding).to(x)).masked_fill(x.isinf(), 0).sum() for j, x in enumerate(out))
    return out, torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True) if loss.requires_grad else []


def _normal(seed: int, *size: int) -> Tensor:
    """Draws of N(0, 1) in float64, the same on every machine."""
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def op_inputs(name: str, B: int, T: int, H: int, Hk: int, D: int, words: str = "") -> dict[str, Tensor]:
    """Random float64 arguments of an op by name, a state per key/value head. Words: vector, a decay for each row of the state; carried, a
    state to start from; bonus; in-cache, a query of its own for kept keys; plain, positive features."""
    x = {"q": _normal(1, B, T, H, D), "k": _normal(2, B, T, Hk, D), "v": _normal(3, B, T, Hk, D)}
    if name == "attend":
        return x | {"sink": _normal(4, H)} | ({"q_keep": _normal(5, B, T, H, D)} if "in-cache" in words else {})
    state = {"C": _normal(6, B, Hk, D, D)} if "carried" in words else {}
    if name == "mlstm":
        if "plain" in words:
            x |= {"q": x["q"].abs(), "k": x["k"].abs()}
        state |= {"n": _normal(7, B, Hk, D), "m": _normal(8, B, Hk)} if state else {}
        return x | {"i": _normal(4, B, T, Hk), "f": _normal(5, B, T, Hk) + 3} | state
    x["k"] = F.normalize(x["k"], dim=-1)
    x["log_a"] = F.logsigmoid((_normal(4, B, T, Hk, D) if "vector" in words else _normal(4, B, T, Hk)) + 3)
    if name == "delta":
        rate = torch.sigmoid(_normal(5, B, T, Hk, 1))
        decay = x["log_a"] if "vector" in words else x["log_a"][..., None]
        x |= {"b": -rate * x["k"], "c": x["k"] * decay.exp(), "k": rate * x["k"]}
    return x | state | ({"bonus": _normal(9, Hk, D)} if "bonus" in words else {})


# ----------------------------------------------------------------------------- check

# (op, words: those of op_inputs, and "one text": no documents; options)
CASES = (
    ("attend", "window 7", dict(window=7)), ("attend", "window 100, keep 3", dict(window=100, keep=3, return_peak=True)),
    ("attend", "in-cache keep 3", dict(window=20, keep=3)), ("attend", "full, one text", {}),
    ("mlstm", "", {}), ("mlstm", "carried, one text", {}), ("mlstm", "plain, m0 -inf", dict(normalizer="plain", m0=-math.inf)),
    ("scan", "scalar", {}), ("scan", "vector, carried", {}), ("scan", "vector, bonus", {}),
    ("delta", "scalar", {}), ("delta", "vector, carried", {}),
    ("steps", "", {}))
SIZES = ((2, 129, 6, 2, 16), (1, 77, 4, 4, 64), (1, 333, 2, 1, 128))  # B, T, H, Hk, D: no block divides T
CHECKS = [(*case, *size) for case in CASES for size in SIZES]
CHECKS += [(*case, *size) for case in CASES[:2] + CASES[4:5] + CASES[8:9] + CASES[11:12] for size in ((1, 70, 6, 3, 32), (1, 41, 2, 1, 256))]
CHECKS += [("distill_loss", words, {}, 257, 65537, 24) for words in ("all", "top 8")]  # M, V, E: more than one slice
RESULTS = {"attend": ("o", "lse", "peak"), "mlstm": ("o", "C", "n", "m"), "scan": ("o", "C"), "delta": ("o", "C"), "distill_loss": ("loss",)}


def check_inputs(name: str, words: str, options: dict, size: list[int]) -> tuple[dict, dict]:
    """The float64 tensors of a check, and its options."""
    if name == "distill_loss":
        M, V, E = size
        top = _normal(3, M, 8), torch.arange(M * 8).reshape(M, 8) * 7919 % V
        return {"hidden": _normal(1, M, E), "weight": _normal(2, V, E)}, {
            "target": top if "top" in words else (_normal(3, M, 5), _normal(4, V, 5)), "labels": torch.arange(M) * 104729 % V,
            "ce": 0.3, "temperature": 2.0}
    B, T = size[:2]
    segment = {} if "one text" in words else {"segment": (torch.arange(T) > T // 3).long().expand(B, T)}
    return op_inputs(name, *size, words), options | segment


def decoded(module, tensors: dict[str, Tensor], device) -> dict[str, Tensor]:
    """The step ops, a token at a time as a decoder does it: what attend_step, mlstm_step and bifocal_step answer over T tokens and the caches
    they leave. A window of 7 after 2 kept tokens; row b is padded for its first 2 b turns. A step op has no gradients."""
    q, k, v, i, f = (tensors[n] for n in ("q", "k", "v", "i", "f"))
    B, T, H, D = q.shape
    Hk, exact = k.shape[2], torch.promote_types(q.dtype, torch.float32)
    q_far, k_far, gate = q.flip(1), k.flip(1), q[..., 0].sigmoid()
    sink = _normal(4, H).to(q)
    caches = [[torch.zeros(B, 9, Hk, D).to(q) for _ in range(2)] for _ in range(2)]
    states = [reference.mlstm_state(B, Hk, D, dtype=exact, device=device) for _ in range(2)]
    out = {"near": [], "far": [], "mixed": []}
    for t in range(T):
        position = (t - 2 * torch.arange(B, device=device)).clamp(min=-1)
        q1, k1, v1, q2, k2, i1, f1, g1 = (x[:, t : t + 1] for x in (q, k, v, q_far, k_far, i, f, gate))
        out["near"].append(module.attend_step(q1, k1, v1, *caches[0], position, sink, keep=2))
        out["far"].append(module.mlstm_step(q2, k2, v1, i1, f1, *states[0], position=position))
        out["mixed"].append(module.bifocal_step(q1, k1, v1, *caches[1], position, q2, k2, i1, f1, *states[1], g1, sink, keep=2))
    kept = zip(("keys", "values", "C", "n", "m"), zip((*caches[0], *states[0]), (*caches[1], *states[1])))
    return {n: torch.cat(x, 1) for n, x in out.items()} | {n: torch.stack(pair) for n, pair in kept}


def check(device: torch.device, only: str | None = None) -> bool:
    """Every op, dtype and awkward size against float64 of reference.py, twice: the bits must be the same. Prints a line for each output and
    each gradient; False if one fails."""
    dtypes = [torch.float32] + [torch.float16, torch.bfloat16] * (device.type == "cuda")
    print(f"{'op':<13}{'':<20}{'B T H Hk D, M V E':<18}{'dtype':<10}{'of':<10}{'max error':>12}{'RMS error':>12}{'allowed':>12}")
    passed = True
    for name, words, options, *size in CHECKS:
        if only not in (None, name):
            continue
        tensors, options = check_inputs("mlstm" if name == "steps" else name, words, options, size)
        for dtype in dtypes:
            def run(module, dtype_, device_):
                if name == "steps":
                    with torch.no_grad():
                        return decoded(module, {n: x.to(device_, dtype_) for n, x in rounded.items()}, device_)
                out, gradients = outputs_and_gradients(module, name, rounded, choices, dtype_, device_, dtype)
                return dict(zip(RESULTS[name], out)) | {f"d {n}": x for n, x in zip(rounded, gradients)}

            rounded = {n: x.to(dtype) for n, x in tensors.items()}
            choices = {n: cast(x, dtype) for n, x in options.items()}
            exact = run(reference, torch.float64, None)
            got, again, same = run(fast, dtype, device), run(fast, dtype, device), run(reference, dtype, device)
            for of, x in got.items():
                y, z = exact[of].detach(), same[of].detach().cpu()
                equal = torch.equal(x, again[of]) and torch.equal(x.isinf().cpu(), y.isinf())
                finite, x = ~y.isinf(), x.detach().cpu()
                error = x[finite].double() - y[finite]
                limit = allowed(x.dtype, y[finite], z[finite], 3 if of.startswith("d ") else 2)
                ok = equal and rms(error) <= limit
                passed &= ok
                print(f"{name:<13}{words:<20}{' '.join(map(str, size)):<18}{str(dtype)[6:]:<10}{of:<10}"
                      f"{error.abs().max().item() if error.numel() else 0:>12.2e}{rms(error):>12.2e}{limit:>12.2e}{'' if ok else '   FAILED'}"
                      f"{'' if equal else ': two runs differ, or infinities'}")
    return passed


def check_graph(device: torch.device) -> bool:
    """On CUDA: a captured step writes the tokens that the same step writes without a graph."""
    texts = []
    for make in (fast.decode_step, fast.decode_graph):
        torch.manual_seed(0)
        model = reference.build(reference.MINI, "bifocal", ops=fast).to(device, torch.bfloat16).eval()
        token, texts = torch.ones(1, 1, dtype=torch.long, device=device), [*texts, []]
        step = make(model, token, model.cache(1))
        for _ in range(100):
            step()
            texts[-1].append(token.item())
    print(f"100 tokens from a CUDA graph and without one: {'the same' if texts[0] == texts[1] else 'FAILED: they differ'}")
    return texts[0] == texts[1]


# ----------------------------------------------------------------------------- time


def in_turns(contenders: dict, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each contender in each of `rounds` rounds in which all take turns, after one to warm up."""
    times = {name: [] for name in contenders}
    for r in range(rounds + 1):
        for name, f in contenders.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            f()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if r:
                times[name].append(time.perf_counter() - start)
    return times


def ratio(a: list[float], b: list[float]) -> float:
    """The median over the rounds of a / b."""
    return statistics.median(x / y for x, y in zip(a, b))


def rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """This device's measured bytes/s of a copy (read and written both count) and operations/s of a matrix product."""
    big, n = (2**28, 8192) if device.type == "cuda" else (2**25, 1024)
    x, y = torch.zeros(big, device=device), torch.empty(big, device=device)
    a = torch.randn(n, n, device=device).to(dtype)
    t = in_turns({"copy": lambda: y.copy_(x), "product": lambda: a @ a}, 5, device)
    return 8 * big / statistics.median(t["copy"]), 2 * n**3 / statistics.median(t["product"])


def work(name: str, size: tuple[int, ...], window: int | None, itemsize: int) -> tuple[int, int]:
    """Bytes that forward and backward must move (each input, output and gradient once) and operations they must do: for attend
    2 + 5 products of D over each visible pair, for a recurrence 2 + 4 of D x D for each step (write, read; their gradients), for the loss
    4 of M x V x E (two heads' logits, two gradients)."""
    if name == "distill_loss":
        M, V, E = size
        return itemsize * 3 * (M + V) * E, 8 * M * V * E
    B, T, H, Hk, D = size
    moved = itemsize * B * T * D * 4 * (H + Hk)  # q, o, dq, do and k, v, dk, dv
    if name == "attend":
        w = min(T, window or T)
        return moved, 14 * B * H * D * (w * (w + 1) // 2 + (T - w) * w)
    return moved, 12 * B * T * D * D * H


def step_forward_backward(f, *tensors: Tensor):
    """A call that runs f forward and backward, the loss a fixed random one."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    with torch.no_grad():
        w = torch.randn_like(f(*tensors))

    def call():
        torch.autograd.grad(f(*tensors), tensors, w)
    return call


def peers(name: str, size: tuple, window: int | None, device: torch.device, dtype: torch.dtype) -> dict:
    """By name, ours first, functions that make each contender's call on the same inputs: ImportError where a peer is not installed."""
    both = step_forward_backward
    if name == "distill_loss":
        M, V, E = size
        hidden, weight, h, w = (torch.randn(n, E, device=device).to(dtype) * E**-0.5 for n in (M, V, M, V))
        return {peer: lambda m=m: both(lambda x, y: m.distill_loss(x, y, (h, w)), hidden, weight)
                for peer, m in (("ours", fast), ("reference.py", reference))}
    B, T, H, Hk, D = size
    x = {n: t.to(device, dtype) for n, t in op_inputs(name, *size).items()}
    q, k, v = x["q"], x["k"], x["v"]
    cuda, gqa = device.type == "cuda", dict(enable_gqa=H != Hk)
    inputs = [q, k, v] if name == "attend" else list(x.values())

    def of(module):
        op = getattr(module, name)
        return lambda: both((lambda *a: op(*a, window=window)) if name == "attend" else (lambda *a: op(*a)[0]), *inputs)

    def swapped(*ts):  # (B, heads, T, D), contiguous
        return [t.transpose(1, 2).contiguous() for t in ts]

    def repeated(*ts):  # a key/value head for every query head
        return [t.repeat_interleave(H // Hk, 2) for t in ts]

    def masked():
        t, s = torch.arange(T)[:, None], torch.arange(T)
        mask = (s <= t) & (s > t - window)
        return both(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, **gqa), *swapped(q, k, v))

    def flash_causal():
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def call(q, k, v):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, **gqa)
        return both(call, *swapped(q, k, v))

    def flex():
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        block = create_block_mask(lambda b, h, t, s: (s <= t) & (s > t - window), None, None, T, T, device=device)
        compiled = torch.compile(flex_attention)
        return both(lambda q, k, v: compiled(q, k, v, block_mask=block, **gqa), *swapped(q, k, v))

    def flash_window():
        from flash_attn import flash_attn_func
        return both(lambda q, k, v: flash_attn_func(q, k, v, causal=True, window_size=(window - 1, 0)), q, k, v)

    def nx_ai(kernel):
        from mlstm_kernels.torch import get_mlstm_kernel
        f = get_mlstm_kernel(f"chunkwise--{kernel}")
        more = dict(chunk_size=128, autocast_kernel_dtype=dtype) if cuda else dict(chunk_size=64)
        return both(lambda *a: f(*a, **more), *swapped(q, *repeated(*inputs[1:])))

    def simple_gla():
        from fla.ops.simple_gla import chunk_simple_gla
        g = x["log_a"] if name == "scan" else F.logsigmoid(x["f"])
        return both(lambda *a: chunk_simple_gla(*a)[0], q, *repeated(k, v, g))

    def gated_delta_rule():
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        beta = torch.full((B, T, H), 0.5, device=device, dtype=dtype)
        return both(lambda *a: chunk_gated_delta_rule(*a)[0], q, *repeated(k, v, x["log_a"]), beta)

    found = {"ours": of(fast)}
    if name == "attend":
        found |= {"PyTorch flash, full causal": flash_causal, "FlexAttention": flex, "flash-attn, window": flash_window} if cuda else {
            "PyTorch, masked": masked}
    if name == "mlstm":
        found |= {f"mlstm_kernels {n}": lambda n=n: nx_ai(n) for n in (["triton_xl_chunk"] if cuda else ["native_custbw", "native_autograd"])}
    if cuda and name in ("mlstm", "scan"):
        found["fla simple_gla"] = simple_gla
    if cuda and name == "delta":
        found["fla gated_delta_rule"] = gated_delta_rule
    if T <= 1024 or name in ("scan", "mlstm") and not cuda:  # a loop over t, T x T matrices: where that ends within seconds
        found["reference.py"] = of(reference)
    return found


# per device: (op, (B, T, H, Hk, D) or (M, V, E), window)
TIMED = {"cpu": [("attend", (1, 8192, 8, 8, 128), 576), ("attend", (1, 1024, 8, 2, 16), 56), ("mlstm", (1, 2048, 8, 8, 128), None),
                 ("scan", (1, 2048, 8, 8, 128), None), ("delta", (1, 2048, 8, 8, 128), None), ("distill_loss", (512, 49152, 576), None)],
         "cuda": [("attend", (1, 65536, 32, 8, 128), 576), ("mlstm", (1, 65536, 32, 8, 128), None), ("mlstm", (8, 8192, 16, 16, 128), None),
                  ("scan", (8, 8192, 16, 16, 128), None), ("delta", (8, 8192, 16, 16, 128), None), ("distill_loss", (8192, 151936, 2560), None)],
         "quick": [("attend", (1, 384, 4, 2, 16), 56), ("mlstm", (1, 384, 4, 2, 16), None), ("scan", (1, 384, 4, 2, 16), None),
                   ("delta", (1, 384, 4, 2, 16), None), ("distill_loss", (129, 352, 64), None)]}  # TFLA takes multiples of 128


def failure(error: Exception) -> str:
    """An exception in one line."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}"


def bench(device: torch.device, quick: bool, only: str | None = None) -> list[dict]:
    """Forward and backward of each op beside its peers, the ratio of each to ours, and the share of what the device could do. A peer that
    fails is a line that says so."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    copy, product = rates(device, dtype)
    print(f"\nthis device: a copy moves {copy / 1e9:.0f} GB/s, a matrix product does {product / 1e9:,.0f} GFLOP/s ({str(dtype)[6:]})")
    print(f"{'forward and backward of':<40}{'peer':<32}{'ms':>10}{'peer / ours':>13}{'MB':>9}{'GFLOP':>9}{'floor ms':>10}{'share':>8}")
    rows = []
    for name, size, window in TIMED["quick" if quick else device.type]:
        if only not in (None, name):
            continue
        moved, operations = work(name, size, window, dtype.itemsize)
        floor = max(moved / copy, operations / product)
        row = {"op": name, "size": size, "window": window, "bytes": moved, "operations": operations, "floor": floor}
        letters = "M V E".split() if name == "distill_loss" else "B T H Hk D W".split()
        label = f"{name} " + " ".join(f"{n}{x}" for n, x in zip(letters, (*size, window)) if x)
        contenders, failed, peak = {}, {}, None
        for peer, make in peers(name, size, window, device, dtype).items():
            try:
                call = make()
                if peer == "ours" and device.type == "cuda":
                    held = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                call()
                if peer == "ours" and device.type == "cuda":
                    peak = torch.cuda.max_memory_allocated() - held
                contenders[peer] = call
            except ImportError:
                pass
            except Exception as error:  # a peer's own fault must not end the run
                failed[peer] = failure(error)
        seconds = in_turns(contenders, 2 if quick else 9, device)
        for peer, all_s in seconds.items():
            s = statistics.median(all_s)
            rows.append(row | {"peer": peer, "seconds": s, "ratio": ratio(all_s, seconds["ours"]) if "ours" in seconds else None})
            last = f"{moved / 1e6:>9,.0f}{operations / 1e9:>9,.1f}{1000 * floor:>10.2f}{100 * floor / s:>7.0f}%" if peer == "ours" else ""
            shown = f"{rows[-1]['ratio']:>12.2f}x" if "ours" in seconds else f"{'-':>13}"
            print(f"{label if peer == next(iter(seconds)) else '':<40}{peer:<32}{1000 * s:>10.2f}{shown}{last}")
        if peak is not None:
            rows[-len(seconds)]["peak_bytes"] = peak
            print(f"{'':<40}{'ours, memory beside the inputs':<32}{peak / 2**30:>10.2f} GiB at most, the gradients included")
        for peer, why in failed.items():
            rows.append(row | {"peer": peer, "failed": why})
            print(f"{label if not seconds else '':<40}{peer:<32}{why}")
    return rows


def bench_constant(device: torch.device, quick: bool) -> dict:
    """What must not grow: attend's time per token with T, a decode step's with its position; and mini training, fast against plain."""
    short, long = (256, 1024) if quick else (8192, 32768)
    x = [_normal(j, 1, long, 8, 128).float().to(device) for j in range(3)]
    run = {T: step_forward_backward(lambda *a: fast.attend(*a, window=64 if quick else 576), *(y[:, :T] for y in x)) for T in (short, long)}
    t = in_turns(run, 2 if quick else 3, device)
    result = {"attend_growth": ratio(t[long], t[short])}
    print(f"\nattend at T={long:,} takes {result['attend_growth']:.2f}x its time at T={short:,} ({long // short}x the tokens)")
    model = reference.build(reference.MINI, "bifocal", ops=fast).to(device)
    token, steps = torch.zeros(1, 1, dtype=torch.long, device=device), 20 if quick else 200

    def decode(position):
        cache = model.cache(1)
        cache.seen.fill_(position)

        @torch.no_grad()
        def call():
            for _ in range(steps):
                model.hidden(token, cache=cache)
        return call
    t = in_turns({p: decode(p) for p in (1_000, 100_000)}, 3 if quick else 9, device)
    result["decode_growth"] = ratio(t[100_000], t[1_000])
    print(f"a decode step of the mini Bifocal at position 100,000 takes {result['decode_growth']:.3f}x one at 1,000 "
          f"({1000 * statistics.median(t[1_000]) / steps:.2f} ms)")
    tokens = torch.randint(0, 352, (2 if quick else 8, 129 if quick else 646), generator=torch.Generator().manual_seed(0)).to(device)

    def training(ops):
        student = reference.build(reference.MINI, "bifocal", ops=ops).to(device)
        teacher = reference.build(reference.MINI, "full", ops=ops).to(device)

        def call():
            with torch.no_grad():
                target = teacher.hidden(tokens[:, :-1]).flatten(0, 1), teacher.head_weight
            hidden = student.hidden(tokens[:, :-1]).flatten(0, 1)
            ops.distill_loss(hidden, student.head_weight, target).backward()
            for p in student.parameters():
                p.grad = None
        return call
    t = in_turns({"fast": training(fast), "reference": training(reference)}, 1 if quick else 3, device)
    result["training_ratio"] = ratio(t["reference"], t["fast"])
    print(f"a stage II step of the miniature: {result['training_ratio']:.2f}x faster with --ops fast ({statistics.median(t['fast']):.2f} s)")
    return result


def bench_decode(device: torch.device, quick: bool) -> dict:
    """A Bifocal model with random weights: tokens/s of decoding at batch 1 after ever longer texts, memory, and prefill beside SWA (the whole
    text at once, no cache kept). On CUDA Qwen3-4B's shape in bfloat16, the step a CUDA graph; on a CPU the miniature, only to see that it
    runs. The floor is what a token must read at the copy rate, half of whose traffic is writes."""
    cuda = device.type == "cuda"
    shape, budget, dtype = (reference.PRESETS["qwen3-4b"], 576, torch.bfloat16) if cuda else (reference.MINI, 72, torch.float32)

    def build(name):
        with torch.device(device):
            return reference.build(shape, name, budget, ops=fast).to(dtype).eval()
    model, steps, positions = build("bifocal"), 64 if cuda else 8, (1_000, 131_072, 1_000_000)
    copy, _ = rates(device, dtype)
    cache, token = model.cache(1), torch.zeros(1, 1, dtype=torch.long, device=device)

    def run(step, position):
        def call():
            cache.seen.fill_(position)
            for _ in range(steps):
                step()
        return call
    memory = {}
    if cuda:  # a replayed graph allocates nothing, so that its peak would be the same by construction
        for position in positions:
            torch.cuda.reset_peak_memory_stats()
            run(fast.decode_step(model, token, cache), position)()
            torch.cuda.synchronize()
            memory[position] = torch.cuda.max_memory_allocated()
    step = fast.decode_graph(model, token, cache)
    t = in_turns({p: run(step, p) for p in positions}, 3 if quick else 9, device)
    moved = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if shape.tied or "embed" not in n)
    moved += shape.layers * cache.bytes_per_layer()
    floor = moved / copy
    print(f"\ndecoding {shape.name} bifocal at batch 1{', a CUDA graph a token' if cuda else ''}: {moved / 1e6:,.0f} MB a token, at least "
          f"{1000 * floor:.3f} ms at this device's copy rate\n{'after tokens':>14}{'ms a token':>12}{'tokens/s':>10}{'of the floor':>14}"
          f"{'to 1,000':>10}{'peak MB':>10}")
    seconds = {p: statistics.median(x) / steps for p, x in t.items()}
    for position, s in seconds.items():
        print(f"{position:>14,}{1000 * s:>12.3f}{1 / s:>10.1f}{100 * floor / s:>13.0f}%{ratio(t[position], t[1_000]):>10.3f}"
              f"{f'{memory[position] / 1e6:,.0f}' if memory else '-':>10}")
    tokens, models = torch.zeros(1, 8192 if cuda else 256, dtype=torch.long, device=device), {"bifocal": model}
    models["swa_learned_sink"] = build("swa_learned_sink")

    def prefill(m):
        @torch.no_grad()
        def call():
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                m.hidden(tokens)
        return call
    p = in_turns({name: prefill(m) for name, m in models.items()}, 2 if quick else 5, device)
    share = ratio(p["swa_learned_sink"], p["bifocal"])
    print(f"prefill of {tokens.shape[1]:,} tokens: bifocal at {share:.2f} of swa_learned_sink's rate "
          f"({tokens.shape[1] / statistics.median(p['bifocal']):,.0f} tokens/s)")
    return {"decode_ms": {p: 1000 * s for p, s in seconds.items()}, "decode_ratio": {p: ratio(x, t[1_000]) for p, x in t.items()},
            "decode_floor_ms": 1000 * floor, "decode_peak_bytes": memory or None, "prefill_ratio": share}


def loss_memory(device: torch.device, M: int = 8192, V: int = 151936, E: int = 2560) -> dict:
    """The most memory that distill_loss takes, forward and backward, beside its inputs and their gradients, in bytes; Qwen3-4B's head by default.
    On a CPU float32 and the growth of the resident set (Linux), on CUDA bfloat16 and its allocator's peak."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden, weight, h, w = (torch.empty(n, E, device=device, dtype=dtype).normal_().mul_(E**-0.5) for n in (M, V, M, V))
    gradients = (hidden.numel() + weight.numel()) * dtype.itemsize

    def resident(key):
        with open("/proc/self/status") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith(key))

    start = time.perf_counter()
    if device.type == "cuda":
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts anew
        held = resident("VmRSS")
    fast.distill_loss(hidden.requires_grad_(), weight.requires_grad_(), (h, w)).backward()
    peak = (torch.cuda.max_memory_allocated() if device.type == "cuda" else resident("VmHWM")) - held - gradients
    print(f"distill_loss, {M:,} tokens x {V:,} ids, width {E:,}, {str(dtype)[6:]}: {peak / 2**30:.2f} GiB at most beside inputs and gradients; "
          f"all logits would be {M * V * 4 / 2**30:.1f} GiB; {time.perf_counter() - start:.0f} s")
    return {"loss_extra_bytes": peak}


def main() -> None:
    """Check every op; if all pass, time them; the last line is JSON."""
    parser = reference.Parser(prog="fast.py", description=main.__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--only", choices=sorted({c[0] for c in CHECKS}), metavar="OP", help="check and time this op alone: %(choices)s")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does the bench itself work")
    parser.add_argument("--compile", action="store_true",
                        help="compile every kernel for sm_80, sm_90, sm_100 and print what each uses: many minutes")
    parser.add_argument("--memory", action="store_true", help="the peak memory of distill_loss at Qwen3-4B's size: minutes, 8 GB")
    args = parser.parse_args()
    if args.compile:
        try:
            import fast_kernels
        except ImportError as error:
            raise reference.UserError(f"--compile needs Triton ({error}): pip install triton, on Linux") from None
        print(json.dumps({"kernels": list(fast_kernels.table())}))
        return
    reference.use_cores()
    device = reference.pick_device(args.device)
    if args.memory:
        print(json.dumps(loss_memory(device)))
        return
    passed = check(device, args.only)
    if device.type == "cuda" and args.only is None:
        passed &= check_graph(device)
    if not passed:
        print(json.dumps({"device": device.type, "checks": "failed"}))
        raise reference.UserError("an op errs more than it may (FAILED above): nothing is timed")
    result = {"device": device.type, "checks": "passed", "times": bench(device, args.quick, args.only)}
    for section in () if args.only else (bench_constant, bench_decode):
        try:
            result |= section(device, args.quick)
        except Exception as error:  # what was measured before is not lost
            result[section.__name__] = failure(error)
            print(f"\n{section.__name__} {result[section.__name__]}")
    print(json.dumps(result))


if __name__ == "__main__":
    reference.cli(main)
