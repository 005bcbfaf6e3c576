"""The decoder against transformers' own models, written to a folder and read back through weights.py.

    python -m pytest tests/test_decoder.py
"""

import json

import pytest
import torch
import transformers

import fast
from common import close
from reference import VARIANTS, Decoder, generate
from weights import HFWeights, load_weights

SIZES = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
             vocab_size=50, max_position_embeddings=70, rms_norm_eps=1e-5, attn_implementation="eager",
             rope_parameters={"rope_type": "default", "rope_theta": 300.0},
             bos_token_id=None, eos_token_id=None, pad_token_id=None)
MODELS = {  # name: transformers' class and what its config adds; head_dim is not hidden / heads where it is given
    "qwen3": ("Qwen3", dict(head_dim=8)),
    "qwen3 tied": ("Qwen3", dict(head_dim=8, tie_word_embeddings=True)),
    "qwen3 biases": ("Qwen3", dict(head_dim=16, attention_bias=True)),
    "qwen2.5": ("Qwen2", {}),
    "qwen2.5 tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "llama": ("Llama", dict(head_dim=8)),
    "llama tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
}


def theirs(family, more, **changes):
    """A tiny random model whose norms and biases are random too."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **more, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def ours(folder, variant="full", window=None, ops=None):
    source = HFWeights(folder)
    model = Decoder(source.model_shape, VARIANTS[variant], window, ops)
    load_weights(model, source)
    return model


def tokens():
    return torch.randint(0, 50, (2, 37), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shard", ["1GB", "8KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(tmp_path, name, dtype, shard):
    model = theirs(*MODELS[name]).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "8KB")
    with torch.no_grad():
        again = type(model).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
        exact = again(tokens()).logits  # a bfloat16 file is computed in float32 by both
        for ops in (None, fast):
            close(ours(tmp_path, ops=ops)(tokens()), exact)


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("family", ["Mistral", "Qwen3"])
def test_window_equals_transformers(tmp_path, family, window):
    """transformers' sliding_window = W is ours: s in [t-W+1, t], the query itself included."""
    more = dict(use_sliding_window=True, max_window_layers=0, head_dim=8) if family == "Qwen3" else {}
    model = theirs(family, more, sliding_window=window)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("sliding_window") == window
    assert set(config.pop("layer_types", ["sliding_attention"])) == {"sliding_attention"}
    config |= {"model_type": "llama"} if family == "Mistral" else {"use_sliding_window": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        exact = model(tokens()).logits
        close(ours(tmp_path, "swa", window)(tokens()), exact)
        with pytest.raises(AssertionError, match="RMS error"):
            close(ours(tmp_path, "swa", window + 1)(tokens()), exact)


def test_greedy_decoding_equals_transformers(tmp_path):
    model = theirs(*MODELS["qwen3 tied"])
    model.save_pretrained(tmp_path)
    prompt = tokens()[:1, :9]
    exact = model.generate(prompt, max_new_tokens=20, do_sample=False)[0, 9:].tolist()
    assert generate(ours(tmp_path), [prompt[0].tolist()], 20, cache_dtype=torch.float32)[0] == [exact]
