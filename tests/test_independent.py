"""The ops against other people's implementations: flash-linear-attention, NX-AI's mlstm_kernels, transformers.

    python -m pytest tests/test_independent.py

What is theirs scales q by 1/sqrt(D) unless told otherwise and knows no groups: it is given k, v and gates repeated.
"""

import importlib.util
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

import fast
import reference
from common import close
from reference import fixed_decay
from test_decoder import ours, theirs, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's, where NX-AI imports Triton
both = pytest.mark.parametrize("module", [reference, fast], ids=["reference", "fast"])
FLA = Path(importlib.util.find_spec("fla").submodule_search_locations[0]) / "ops"
B, T, H, Hs, R, D, Dv = 2, 77, 12, 3, 4, 5, 7


def fla(file, name):
    """fla's plain PyTorch function. Its file is run alone: to import fla.ops takes Triton and many seconds."""
    return runpy.run_path(str(FLA / file))[name]


def nx_ai():
    """NX-AI's kernels, or skip the test: they need Python 3.11 and, to be imported, Triton."""
    return pytest.importorskip("mlstm_kernels.torch", reason="needs mlstm_kernels", exc_type=ImportError)


def draw(seed, *size):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def spread(*xs, heads=2):
    """Every head as often as query heads read it."""
    return [x.repeat_interleave(R, dim=heads) for x in xs]


def heads_first(*xs):
    return [x.transpose(1, 2) for x in xs]


def agree(mine, other, leaves, dtype=torch.float32):
    """Results and, for a random loss of all of them, gradients of all leaves; `other` computes in `dtype`."""
    results = []
    for f, kind in ((mine, torch.float32), (other, dtype)):
        xs = [x.to(kind).detach().requires_grad_() for x in leaves]
        out = f(*xs)
        loss = sum((x * draw(10 + j, *x.shape)).sum() for j, x in enumerate(out))
        results.append([*out, *torch.autograd.grad(loss, xs)])
    for got, exact in zip(*results, strict=True):
        close(got, exact)


# ---------------------------------------------------------------- near


@both
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("window", [None, 1, 6])
def test_attend(module, window, sink):
    """fla: a window, a learned sink per query head, groups of query heads; it counts the sink in the greatest score."""
    leaves = [draw(0, B, T, H, D), draw(1, B, T, Hs, D), draw(2, B, T, Hs, D), *([draw(3, H)] if sink else [])]
    naive = fla("attn/naive.py", "naive_parallel_attn")

    def mine(q, k, v, s=None):
        peak = module.attend(q, k, v, s, window=window, return_peak=True)[2]
        return module.attend(q, k, v, s, window=window), peak if s is None else torch.maximum(peak, s)

    agree(mine, lambda q, k, v, s=None: naive(q, k, v, window_size=window, sink_bias=s), leaves, torch.float64)


@both
@pytest.mark.parametrize("window", [None, 6])
def test_attend_documents(module, window):
    """fla decodes the last token of every document of a packed row."""
    lengths = torch.tensor([1, 40, 3, 33])
    ends, segment = lengths.cumsum(0), torch.arange(4).repeat_interleave(lengths)[None]
    q, k, v, sink = draw(0, 1, T, H, D), draw(1, 1, T, Hs, D), draw(2, 1, T, Hs, D), draw(3, H)
    naive = fla("attn/naive.py", "naive_attn_decoding")
    exact = naive(q[:, ends - 1], k, v, cu_seqlens=F.pad(ends, (1, 0)), window_size=window, sink_bias=sink)
    close(module.attend(q, k, v, sink, window=window, segment=segment)[:, ends - 1], exact)


@pytest.mark.parametrize("family, plain", [("Mistral", "Llama"), ("Qwen2", "Qwen2")])
def test_sliding_cache(tmp_path, family, plain):
    """Eight steps of transformers through its own sliding cache: the logits are our window's, whole and from a cache."""
    more = dict(use_sliding_window=True, max_window_layers=0) if family == "Qwen2" else {}
    model, twin = theirs(family, more, sliding_window=5), theirs(plain, {})
    twin.load_state_dict(model.state_dict())
    twin.save_pretrained(tmp_path)
    window = ours(tmp_path, "swa", 5)
    out = model.generate(tokens(), max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
    cache, exact, ids = window.cache(2, dtype=torch.float32), torch.stack(out.logits, 1), out.sequences[:, :-1]
    with torch.no_grad():
        close(window(ids)[:, 36:], exact)
        close(torch.cat([window(piece, cache=cache) for piece in ids.split(4, 1)], 1)[:, 36:], exact)


# ---------------------------------------------------------------- mlstm


def gated():
    return [draw(0, B, T, H, D), draw(1, B, T, Hs, D), draw(2, B, T, Hs, D), draw(3, B, T, Hs), 2 + draw(4, B, T, Hs)]


def nxai(kernel, q, k, v, i, f, **options):
    """NX-AI's layout is heads first; eps is what they add to the denominator."""
    return kernel(*heads_first(q, *spread(k, v, i, f)), eps=0.0, **options)


@both
@pytest.mark.parametrize("form", ["recurrent", "chunkwise"])
@pytest.mark.parametrize("start", ["empty", "state"])
def test_mlstm(module, form, start):
    """NX-AI's native code step by step and in chunks: their (C, n, m) is ours, and an empty m is 0."""
    kernel, options = {"recurrent": (nx_ai().get_mlstm_sequence_kernel("native_sequence__native"), dict(dtype_state=torch.float64)),
                       "chunkwise": (nx_ai().get_mlstm_kernel("chunkwise--native_autograd"), dict(chunk_size=11))}[form]
    state = [draw(5, B, Hs, D, D), draw(6, B, Hs, D), draw(7, B, Hs)] if start == "state" else []

    def mine(q, k, v, i, f, *state):
        o, new = module.mlstm(q, k, v, i, f, state=state or None)
        return o, *new

    def other(q, k, v, i, f, *state):
        if state:
            C, n, m = spread(*state, heads=1)
            options.update(c_initial=C, n_initial=n, m_initial=m[..., None])
        o, (C, n, m) = nxai(kernel, q, k, v, i, f, return_last_states=True, **options)
        return o.transpose(1, 2), C[:, ::R], n[:, ::R], m[:, ::R, 0]

    agree(mine, other, gated() + state, torch.float64)


@both
@pytest.mark.parametrize("m0", [0.0, -torch.inf])
@pytest.mark.parametrize("form", ["native", "native_stablef", "native_siging"])
def test_mlstm_parallel(module, form, m0):
    """NX-AI's parallel forms, which start from no m; a sigmoid input gate is i = logsigmoid(i~)."""
    kernel, gate = nx_ai().get_mlstm_kernel(f"parallel--{form}_autograd"), F.logsigmoid if "siging" in form else lambda i: i
    agree(lambda q, k, v, i, f: module.mlstm(q, k, v, gate(i), f, m0=m0)[:1],
          lambda *leaves: [nxai(kernel, *leaves).transpose(1, 2)], gated(), torch.float64)


# ---------------------------------------------------------------- scan


def keys(*more):
    return [draw(0, B, T, H, D), draw(1, B, T, Hs, D), draw(2, B, T, Hs, Dv), draw(3, B, Hs, D, Dv), *more]


def decay(*size):
    return F.logsigmoid(2 + draw(4, B, T, Hs, *size))


@both
@pytest.mark.parametrize("kind", ["linear_attn", "simple_gla", "gla", "rwkv6"])
def test_scan(module, kind):
    """fla without decay, with one per head, with one per row of the state, and with a bonus, read before the decay."""
    more = {"linear_attn": [], "simple_gla": [decay()], "gla": [decay(D)], "rwkv6": [decay(D), draw(5, Hs, D)]}[kind]
    naive = fla("rwkv6/recurrent_naive.py" if kind == "rwkv6" else f"{kind}/naive.py", f"naive_recurrent_{kind}")

    def other(q, k, v, state, log_a=None, bonus=None):
        given = [q, *spread(k, v, *([] if log_a is None else [log_a]))]
        given = [*heads_first(*given), *spread(bonus, heads=0)] if kind == "rwkv6" else given
        o, S = naive(*given, initial_state=spread(state, heads=1)[0], output_final_state=True)
        return o.transpose(1, 2) if kind == "rwkv6" else o, S[:, ::R]

    agree(lambda q, k, v, state, log_a=None, bonus=None: module.scan(q * D**-0.5, k, v, log_a, state=state, bonus=bonus),
          other, keys(*more))


@both
def test_normalised_linear_attention(module):
    """fla divides by q . (sum of k): for us one more column of v, of ones, and of the state."""
    naive = fla("linear_attn/naive.py", "naive_recurrent_linear_attn")

    def mine(q, k, v, C, n):
        o, S = module.scan(q.exp(), k.exp(), F.pad(v, (0, 1), value=1.0), state=torch.cat([C, n[..., None]], -1))
        return o[..., :-1] / o[..., -1:], S[..., :-1], S[..., -1]

    def other(q, k, v, C, n):
        q, k, v, C, n = q.exp(), *spread(k.exp(), v), *spread(C, n, heads=1)
        o, (C, n) = naive(q, k, v, initial_state=(C, n[:, None]), normalize=True, output_final_state=True)
        return o, C[:, ::R], n[:, 0, ::R]

    agree(mine, other, keys(draw(5, B, Hs, D).exp()))


@both
def test_retention(module):
    """fla's retention has the decays that 'retnet' has."""
    log_a = fixed_decay("retnet", Hs).expand(B, T, Hs)
    naive = fla("retention/naive.py", "naive_retention")
    leaves = [draw(0, B, T, Hs, D), draw(1, B, T, Hs, D), draw(2, B, T, Hs, Dv)]
    agree(lambda q, k, v: module.scan(q * D**-0.5, k, v, log_a)[:1],
          lambda q, k, v: heads_first(naive(*heads_first(q, k, v))), leaves)


@both
def test_mamba2(module):
    """transformers' Mamba-2 around its scan, a prompt and four steps after it: C, B, dt x are q, k, v; D skips."""
    torch.manual_seed(0)
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(
        hidden_size=14, num_heads=4, head_dim=7, state_size=5, n_groups=2, conv_kernel=3, chunk_size=16, num_hidden_layers=1,
        vocab_size=50, bos_token_id=None, eos_token_id=None, pad_token_id=None)).eval()
    mixer, inputs, outputs = model.backbone.layers[0].mixer, [], []
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    mixer.in_proj.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    mixer.norm.register_forward_pre_hook(lambda _, given: outputs.append(given[0]))
    with torch.no_grad():
        model.generate(tokens(), max_new_tokens=5, do_sample=False)
        assert [x.shape[1] for x in inputs] == [37, 1, 1, 1, 1]
        x, dt = mixer.in_proj(torch.cat(inputs, 1))[..., 28:].split([28 + 2 * 10, 4], -1)
        x = F.pad(x.transpose(1, 2), (2, 0))
        x = F.silu(F.conv1d(x, mixer.conv1d.weight, mixer.conv1d.bias, groups=48)).transpose(1, 2)
        v, k, q = (part.unflatten(-1, (heads, -1)) for part, heads in zip(x.split([28, 10, 10], -1), (4, 2, 2)))
        k, q = k.repeat_interleave(2, 2), q.repeat_interleave(2, 2)
        dt = F.softplus(dt + mixer.dt_bias)
        o = module.scan(q, k, v * dt[..., None], -mixer.A_log.exp() * dt)[0] + mixer.D[:, None] * v
    close(o.flatten(2), torch.cat(outputs, 1))


# ---------------------------------------------------------------- delta


@both
@pytest.mark.parametrize("kind", ["delta_rule", "gated_delta_rule", "kda"])
def test_gated_delta(module, kind):
    """fla's delta rule, the decay none, per head or per row: it erases from the decayed state, b = -beta k, c = a k."""
    name = "delta_rule_recurrence" if kind == "delta_rule" else f"naive_recurrent_{kind}"
    naive, more = fla(f"{kind}/naive.py", name), {"delta_rule": [], "gated_delta_rule": [decay()], "kda": [decay(D)]}[kind]

    def mine(q, k, v, state, beta, log_a=None):
        k, beta = F.normalize(k, dim=-1), beta.sigmoid()[..., None]
        a = 1 if log_a is None else log_a.reshape(B, T, Hs, -1).exp()
        return module.delta(q * D**-0.5, beta * k, v, log_a, -beta * k, a * k, state=state)

    def other(q, k, v, state, beta, log_a=None):
        k, v, beta = spread(F.normalize(k, dim=-1), v, beta.sigmoid())
        given = dict(beta=beta) if log_a is None else dict(beta=beta, g=spread(log_a)[0])
        if kind == "delta_rule":
            q, k, v, given["beta"] = heads_first(q, k, v, beta)
        o, S = naive(q, k, v, **given, initial_state=spread(state, heads=1)[0], output_final_state=True)
        return o.transpose(1, 2) if kind == "delta_rule" else o, S[:, ::R]

    agree(mine, other, keys(draw(5, B, T, Hs), *more))


@both
def test_generalised_delta(module):
    """fla's diagonal plus low rank, alpha = c and beta = b: with c = kappa and b = -rate kappa, RWKV-7."""
    naive = fla("generalized_delta_rule/dplr/naive.py", "dplr_recurrence")

    def factors(kappa, rate):
        kappa = F.normalize(kappa, dim=-1)
        return -rate.sigmoid() * kappa, kappa

    def mine(q, k, v, state, kappa, rate, log_a):
        return module.delta(q * D**-0.5, k, v, log_a, *factors(kappa, rate), state=state)

    def other(q, k, v, state, kappa, rate, log_a):
        b, c = factors(kappa, rate)
        o, S = naive(*heads_first(q, *spread(k, v, c, b, log_a)), initial_state=spread(state, heads=1)[0])
        return o.transpose(1, 2), S[:, ::R]

    agree(mine, other, keys(draw(5, B, T, Hs, D), draw(6, B, T, Hs, D), decay(D)))
