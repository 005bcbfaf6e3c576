"""One token at a time: reference.py's step ops, and fast_kernels/step.py through Triton's interpreter, against the whole-sequence ops."""

import inspect

import pytest
import torch

import reference
from common import close

kernels = pytest.importorskip("fast_kernels.step", reason="the kernels need Triton: Linux", exc_type=ImportError)
pytestmark = pytest.mark.usefixtures("poisoned")
both = pytest.mark.parametrize("ops", [reference, kernels], ids=["reference", "kernels"])

B, T = 2, 21
START = torch.tensor([0, 3])  # row 1 is padded for its first three turns: its tokens come later


def draw(seed, *size):
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def near_inputs(H=6, Hk=3, D=16, q_keep=False):
    return dict(q=draw(1, B, T, H, D), k=draw(2, B, T, Hk, D), v=draw(3, B, T, Hk, D)) | ({"q_keep": draw(4, B, T, H, D)} if q_keep else {})


def far_inputs(H=6, Hs=3, D=16):
    return dict(q_far=draw(5, B, T, H, D), k_far=draw(6, B, T, Hs, D), i=2 * draw(7, B, T, Hs), f=3 * draw(8, B, T, Hs) + 1)


def turns(tensors, dtype):
    """Turn after turn: the rows' positions (-1: padded, with numbers that must not matter) and the tensors of their tokens, (B, 1, ...)."""
    for turn in range(T + int(START.max())):
        position = torch.where((turn >= START) & (turn < START + T), turn - START, -1)
        rows = torch.arange(B), position.clamp(min=0)
        live = position >= 0
        yield position, {n: torch.where(live.reshape(B, *[1] * (x.ndim - 2)), x[rows], 1e3)[:, None].to(dtype) for n, x in tensors.items()}


def gather(outputs):
    """Turns of (position, o (B, 1, ...)) -> (B, T, ...); a padded row's o is 0."""
    out = torch.zeros(B, T, *outputs[0][1].shape[2:], dtype=outputs[0][1].dtype)
    for position, o in outputs:
        for b, p in enumerate(position.tolist()):
            if p >= 0:
                out[b, p] = o[b, 0]
            else:
                assert not o[b].any()
    return out


def new_cache(W, N, Hk, D, dtype):
    """Slots that were never written hold nonsense, finite because masks multiply it by 0."""
    return tuple(torch.full((B, N + W, Hk, D), 777.0, dtype=dtype) for _ in range(2))


def rounded(tensors, dtype):
    return {n: x.to(dtype).double() for n, x in tensors.items()}


@both
@pytest.mark.parametrize("W, N, Hk, D, learned, in_cache, dtype", [
    (7, 0, 3, 16, True, False, torch.float32), (7, 3, 3, 16, False, False, torch.float32), (5, 2, 1, 64, True, True, torch.float32),
    (1, 0, 6, 16, False, False, torch.float32), (1, 1, 3, 16, True, True, torch.float32), (40, 3, 2, 16, True, False, torch.float32),
    (7, 3, 3, 16, False, False, torch.float16), (5, 2, 1, 64, True, True, torch.float16)])
def test_attend_step(ops, W, N, Hk, D, learned, in_cache, dtype):
    tensors = rounded(near_inputs(6, Hk, D, in_cache), dtype)
    sink = draw(9, 6).float() if learned else None
    exact = reference.attend(*(tensors[n] for n in "qkv"), None if sink is None else sink.double(), window=W, keep=N,
                             q_keep=tensors.get("q_keep"))
    keys, values = new_cache(W, N, Hk, D, dtype)
    outputs = []
    for position, x in turns(tensors, dtype):
        before = keys.clone(), values.clone()
        outputs.append((position, ops.attend_step(x["q"], x["k"], x["v"], keys, values, position, sink, keep=N, q_keep=x.get("q_keep"))))
        for b, p in enumerate(position.tolist()):  # the one slot of the token changed, and nothing in a padded row
            slot = -1 if p < 0 else p if p < N else N + (p - N) % W
            for cache, old, new in ((keys, before[0], x["k"]), (values, before[1], x["v"])):
                others = torch.arange(N + W) != slot
                assert torch.equal(cache[b, others], old[b, others]) and (slot < 0 or torch.equal(cache[b, slot], new[b, 0].to(dtype)))
    same = reference.attend(*(tensors[n].to(dtype) for n in "qkv"), sink if sink is None else sink.to(dtype), window=W, keep=N,
                            q_keep=None if not in_cache else tensors["q_keep"].to(dtype))
    close(gather(outputs), exact, same)


def run_far(ops, tensors, dtype, normalizer="floor", **more):
    """The outputs of every turn, and the final state."""
    Hs, D = tensors["k"].shape[2:]
    state = reference.mlstm_state(B, Hs, D)
    outputs = []
    for position, x in turns(tensors, dtype):
        before = [s.clone() for s in state]
        outputs.append((position, ops.mlstm_step(**x, **dict(zip("Cnm", state)), position=position, normalizer=normalizer, **more)))
        for b, p in enumerate(position.tolist()):
            assert p >= 0 or all(torch.equal(s[b], old[b]) for s, old in zip(state, before))
    return gather(outputs), state


@both
@pytest.mark.parametrize("H, Hs, Hk, D, normalizer, scale", [(6, 3, 3, 16, "floor", None), (6, 6, 2, 16, "floor", 1.0), (4, 1, 1, 64, "plain", 1.0)])
def test_mlstm_step(ops, H, Hs, Hk, D, normalizer, scale):
    far = rounded(far_inputs(H, Hs, D), torch.float32)
    tensors = dict(q=far["q_far"], k=far["k_far"], v=draw(3, B, T, Hk, D).float().double(), i=far["i"], f=far["f"])
    if normalizer == "plain":
        tensors |= {n: tensors[n].abs() for n in "qk"}
    exact = reference.mlstm(**tensors | {"v": tensors["v"].repeat_interleave(Hs // Hk, 2)}, normalizer=normalizer, scale=scale)
    got, state = run_far(ops, tensors, torch.float32, normalizer, scale=scale)
    close(got, exact[0])
    for x, y in zip(state, exact[1]):
        close(x, y)


def run_bifocal(ops, tensors, dtype, H, Hs, Hk, D, W, N):
    """The outputs, the ring and the state; gates of the state in float32, as a decoder gives them."""
    keys, values = new_cache(W, N, Hk, D, dtype)
    state = reference.mlstm_state(B, Hs, D)
    outputs = []
    for position, x in turns(tensors, torch.float64):
        x = {n: y.to(torch.float32 if n in "if" else dtype) for n, y in x.items()}
        outputs.append((position, ops.bifocal_step(**x, keys=keys, values=values, position=position, **dict(zip("Cnm", state)),
                                                   sink=draw(9, H).float(), keep=N)))
    return gather(outputs), keys, values, state


@both
@pytest.mark.parametrize("Hs, dtype", [(3, torch.float32), (6, torch.float32), (3, torch.float16)])
def test_bifocal_step(ops, Hs, dtype):
    """It is its two halves mixed, and leaves what they leave."""
    H, Hk, D, W, N = 6, 3, 16, 5, 2
    tensors = rounded(near_inputs(H, Hk, D) | far_inputs(H, Hs, D) | {"gate": draw(10, B, T, H).sigmoid()}, dtype)
    near = reference.attend(*(tensors[n] for n in "qkv"), draw(9, H), window=W, keep=N)
    far, last = reference.mlstm(tensors["q_far"], tensors["k_far"], tensors["v"].repeat_interleave(Hs // Hk, 2), tensors["i"], tensors["f"])
    g = tensors["gate"][..., None]
    got, keys, values, state = run_bifocal(ops, tensors, dtype, H, Hs, Hk, D, W, N)
    same = run_bifocal(reference, tensors, dtype, H, Hs, Hk, D, W, N)[0]
    close(got, g * far + (1 - g) * near, same)
    for x, y in zip(state, last):
        close(x, y)
    held = reference.slot_positions(torch.full((B,), T), N, W)
    for b in range(B):
        assert torch.equal(keys[b], tensors["k"][b, held[b]].to(dtype)) and torch.equal(values[b], tensors["v"][b, held[b]].to(dtype))


def test_counters_are_given_back():
    """The arrival counters of n and m are 0 after a launch: the next one, or a replayed graph, finds what it needs."""
    far = far_inputs()
    run_far(kernels, dict(q=far["q_far"], k=far["k_far"], v=draw(3, B, T, 3, 16), i=far["i"], f=far["f"]), torch.float32)
    assert kernels._counters and not any(x.any() for x in kernels._counters.values())


def test_signatures():
    for name in ("attend_step", "mlstm_step", "bifocal_step"):
        assert inspect.signature(getattr(kernels, name)) == inspect.signature(getattr(reference, name))


def test_refused(monkeypatch):
    x = {n: t[:, :1].float() for n, t in near_inputs().items()}
    keys, values = new_cache(7, 0, 3, 16, torch.float32)
    x |= dict(keys=keys, values=values, position=torch.zeros(B, dtype=torch.int64))
    cases = [({"q": x["q"].double()}, "float64"), ({"k": x["k"].half()}, "k is torch.float16"), ({"position": torch.zeros(B)}, "position"),
             ({"q": torch.zeros(B, 2, 6, 16)}, "q (2, 2, 6, 16)"), ({"keep": 7}, "keep 7"), ({"sink": torch.zeros(3)}, "sink"),
             ({"values": values.half()}, "values are torch.float16"), ({"q": x["q"].requires_grad_()}, "q requires grad")]
    for change, words in cases:
        with pytest.raises(ValueError) as caught:
            kernels.attend_step(**x | change)
        assert words in str(caught.value) and "\n" not in str(caught.value)
    state = dict(zip("Cnm", reference.mlstm_state(B, 3, 16)))
    far = far_inputs()
    y = dict(q=far["q_far"][:, :1].float(), k=far["k_far"][:, :1].float(), v=x["v"], i=far["i"][:, :1].float(), f=far["f"][:, :1].float()) | state
    for change, words in (({"C": state["C"].half()}, "C is torch.float16"), ({"normalizer": "none"}, "normalizer"), ({"i": y["i"][..., :2]}, "i (")):
        with pytest.raises(ValueError) as caught:
            kernels.mlstm_step(**y | change)
        assert words in str(caught.value)
    monkeypatch.delenv("TRITON_INTERPRET")
    with torch.no_grad(), pytest.raises(ValueError, match="cpu"):
        kernels.attend_step(**x)
