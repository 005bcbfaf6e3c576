"""tasks.py: problems and text, the tokenizers that read them, and the checking of answers.

The queue machine (method: a task made to need memory past the window). A prompt gives a random permutation of
K symbols as a table, a queue of 8 registers and a number of steps n. Each step pops the front x, looks up
y = table[x], pushes y at the back, and writes one line: steps left, x, y, the other seven registers.

    python tasks.py --steps 2 --symbols 4 --seed 0      # show a problem, its answer and its tokens

    table a f f c c d d a
    queue a c d d f a c a
    steps
    2
    2 a f c d d f a c a
    1 c d d d f a c a f
    done

The prompt ends with the number of steps; every word is one token. Prompt: 2K + 12 tokens; answer: 10 n + 1. The symbol y
was last written next to x some lines ago, or only in the table: a window of W tokens sees about W/10 lines.

Two controls, not made for the state (--task recent, --task facts):

    recent   the same lines, but y is always the letter after x: nothing older than 16 tokens matters
    facts    n pairs of a number and a letter in random order, to be written from n down to 1: more than a state can hold
"""

from __future__ import annotations

import functools
import json
import math
import re
import sysconfig
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch

from reference import Decoder, Parser, UserError, cli, generate
from weights import GGUFWeights, HFWeights, RunWeights, find_smollm2, import_gguf, read_json

SYMBOLS = "abcdefghijklmnop"
REGISTERS = 8
MAX_STEPS = 60
LENGTHS = (2, 4, 8, 16, 32, 60)  # the steps that are evaluated: 21 ... 601 answer tokens (facts: 5 ... 121)
LINE = REGISTERS + 2  # tokens of one answer step
TRAINING, EVALUATION = 1, 2  # streams of random numbers: default_rng([seed, stream, ...])


# ----------------------------------------------------------------------------- the queue machine


@dataclass(frozen=True)
class Problem:
    """One problem as text, with what the checks and the window bound need to know of it."""

    family: str  # a key of FAMILIES
    prompt: str
    answer: str
    steps: int
    table: tuple[tuple[str, str], ...]  # the pairs in the order of the prompt
    popped: tuple[str, ...]  # x of every step


def queue_problem(rng: np.random.Generator, steps: int, symbols: int | None = None) -> Problem:
    """A random problem of `steps` steps over K = `symbols` symbols (2...16 at random if None)."""
    K = int(rng.integers(2, len(SYMBOLS) + 1)) if symbols is None else symbols
    if not 2 <= K <= len(SYMBOLS):
        raise UserError(f"--symbols {K}: the queue machine has 2 to {len(SYMBOLS)} symbols")
    if not 1 <= steps <= MAX_STEPS:
        raise UserError(f"--steps {steps}: the queue machine takes 1 to {MAX_STEPS} steps")
    keys = [SYMBOLS[j] for j in rng.permutation(len(SYMBOLS))[:K]]
    table = dict(zip(keys, (keys[j] for j in rng.permutation(K))))
    queue = [keys[j] for j in rng.integers(0, K, REGISTERS)]
    prompt = ("table " + " ".join(f"{x} {y}" for x, y in table.items())
              + "\nqueue " + " ".join(queue) + f"\nsteps\n{steps}")
    lines, popped = run_queue(queue, table, steps)
    return Problem("queue", prompt, lines + "\ndone", steps, tuple(table.items()), popped)


def run_queue(queue: list[str], table: dict[str, str], steps: int) -> tuple[str, tuple[str, ...]]:
    """The lines of `steps` steps, and what every step popped."""
    lines, popped = [], []
    for left in range(steps, 0, -1):
        x, *queue = queue
        lines.append(f"\n{left} {x} {table[x]} " + " ".join(queue))
        popped.append(x)
        queue.append(table[x])
    return "".join(lines), tuple(popped)


def recent_problem(rng: np.random.Generator, steps: int) -> Problem:
    """The queue machine without a table: y is the letter after x, of all 16 in a circle. Every token follows from the last 16."""
    table = dict(zip(SYMBOLS, SYMBOLS[1:] + SYMBOLS[:1]))
    queue = [SYMBOLS[j] for j in rng.integers(0, len(SYMBOLS), REGISTERS)]
    lines, popped = run_queue(queue, table, steps)
    prompt = "\nqueue " + " ".join(queue) + f"\nsteps\n{steps}"
    return Problem("recent", prompt, lines + "\ndone", steps, tuple(table.items()), popped)


def facts_problem(rng: np.random.Generator, count: int) -> Problem:
    """`count` pairs of a number and a random letter, in random order; the answer gives them from the last number to 1."""
    values = {str(j): SYMBOLS[rng.integers(len(SYMBOLS))] for j in range(1, count + 1)}
    table = tuple((str(j + 1), values[str(j + 1)]) for j in rng.permutation(count))
    asked = tuple(map(str, range(count, 0, -1)))
    prompt = "table" + "".join(f"\n{x} {y}" for x, y in table) + f"\nsteps\n{count}"
    return Problem("facts", prompt, "".join(f"\n{x} {values[x]}" for x in asked) + "\ndone", count, table, asked)


def drill_problem(rng: np.random.Generator, queries: int) -> Problem:
    """A table and direct queries, `x y` pairs: what the teacher learns look-ups on before the full task."""
    K = int(rng.integers(2, len(SYMBOLS) + 1))
    base = queue_problem(rng, 1, K)
    table = dict(base.table)
    popped = tuple(base.table[j][0] for j in rng.integers(0, K, queries))
    prompt = base.prompt.split("\n")[0] + "\ndrill"
    return Problem("drill", prompt, "".join(f" {x} {table[x]}" for x in popped), queries, base.table, popped)


@dataclass(frozen=True)
class Family:
    """A kind of problem."""

    draw: Callable[..., Problem]  # (rng, steps) -> a problem
    line: int  # tokens of one step of an answer
    asked: int  # which of them is looked up; all others are copied or counted
    prompt: Callable[[int], int]  # about how many tokens a prompt of so many steps has

    def answer(self, steps: int) -> int:
        """Tokens of an answer."""
        return self.line * steps + 1


FAMILIES = {"queue": Family(queue_problem, LINE, 2, lambda n: 31), "recent": Family(recent_problem, LINE, 2, lambda n: 11),
            "facts": Family(facts_problem, 2, 1, lambda n: 2 * n + 3)}


_WORDS = (["table"] + [f" {s}" for s in SYMBOLS] + ["\nqueue", "\nsteps", "\ndrill", "\ndone"]
          + [f"\n{n}" for n in range(1, MAX_STEPS + 1)])
_RANKS = {bytes([b]): b for b in range(256)} | {w.encode(): 256 + j for j, w in enumerate(_WORDS)}


DONE = _RANKS[b"\ndone"]


@functools.cache
def queue_tokenizer() -> Tokenizer:
    """The miniature's tokenizer: 256 bytes, then one rank per word, with the space or newline before it."""
    encoding = tiktoken.Encoding("queue-machine", pat_str=r"[ \n]?[^ \n]+|[ \n]", mergeable_ranks=_RANKS, special_tokens={})
    return Tokenizer(encoding, np.arange(len(_RANKS)), list(_RANKS), {}, bos=None, eos=DONE, stop=(DONE,))


def queue_batch(problems: list[Problem]) -> tuple[np.ndarray, np.ndarray]:
    """Problems as rows: tokens (B, T), padded with DONE on the right, and the answer mask (B, T).

    The mask is True at the tokens a student must produce: the answer, of a drill the looked-up symbols alone.
    """
    encode = queue_tokenizer().encode
    rows = [(encode(p.prompt), encode(p.answer)) for p in problems]
    T = max(len(a) + len(b) for a, b in rows)
    tokens, mask = np.full((len(rows), T), DONE), np.zeros((len(rows), T), dtype=bool)
    for j, (a, b) in enumerate(rows):
        tokens[j, : len(a) + len(b)] = a + b
        mask[j, len(a) : len(a) + len(b)] = True
        if problems[j].family == "drill":
            mask[j, len(a) :: 2] = False
    return tokens, mask


def window_bound(problem: Problem, window: int) -> float:
    """Chance that the best reader of a `window`-token window writes the whole answer: an upper bound for one hop.

    When y is due the last token is x; the reader sees the pairs whose two tokens lie in the window. If x's pair is
    among them it is right; otherwise it guesses among the symbols that no visible pair explains: K minus the
    number of distinct visible pairs (of `facts`, among all 16 letters; `recent` needs no pair). All else (counting, copying) is taken
    as perfect. Layers stacked on windows can pass a symbol on (up to L*W tokens), so a trained model may in principle exceed it.
    """
    K, chance = len(problem.table), 1.0
    if problem.family == "recent":
        return chance if window >= 2 * REGISTERS else 0.0
    if problem.family == "facts":
        for j, x in enumerate(problem.popped):  # of pair i the symbol stands at 2 + 2 i, and x at 1 + 2 i
            now = 2 * K + 3 + 2 * j
            if 1 + 2 * [key for key, _ in problem.table].index(x) <= now - window:
                chance /= len(SYMBOLS)
        return chance
    start = 2 * K + 4 + REGISTERS  # tokens of the prompt
    written = [(1 + 2 * j, x) for j, (x, _) in enumerate(problem.table)]
    for j, x in enumerate(problem.popped):
        now = start + LINE * j + 1
        seen = {key for position, key in written if position > now - window}
        if x not in seen:
            chance /= K - len(seen)
        written.append((now, x))
    return chance


# ----------------------------------------------------------------------------- answers


@dataclass(frozen=True)
class Outcome:
    """What became of one problem."""

    text: str
    exact: bool
    truncated: bool  # cut off before it was done: wrong, and counted apart


def queue_problems(count: int, steps: int, seed: int = 0, symbols: int | None = None, family: str = "queue") -> list[Problem]:
    """The evaluation problems of one length: the same for every model, from a stream of random numbers of their own."""
    rng = np.random.default_rng([seed, EVALUATION, steps])
    return [FAMILIES[family].draw(rng, steps, *([symbols] if family == "queue" else [])) for _ in range(count)]


def solve(model: Decoder, problems: list[Problem], *, batch: int = 200) -> tuple[list[Outcome], int]:
    """Greedy answers through the real ring and state, at most one line longer than the right one.

    Returns an outcome per problem and the bytes that one layer held for one sequence (keys and values bfloat16).
    """
    tokenizer, outcomes, held = queue_tokenizer(), [], 0
    for a in range(0, len(problems), batch):
        part = problems[a : a + batch]
        family = FAMILIES[part[0].family]
        limit = family.answer(max(p.steps for p in part)) + LINE
        answers, cache = generate(model, [tokenizer.encode(p.prompt) for p in part], limit,
                                  stop=tokenizer.stop, vocab=tokenizer.size)
        held = max(held, cache.bytes_per_layer())
        for problem, ids in zip(part, answers):
            text = tokenizer.decode(ids)
            outcomes.append(Outcome(text, text == problem.answer, ids[-1] not in tokenizer.stop))
    return outcomes, held


@torch.no_grad()
def reading_accuracy(model: Decoder, problems: list[Problem]) -> dict[str, float]:
    """What the model would write next while it reads the right answers, as shares: look_up, every step's y; copy, all the rest."""
    rows, mask = queue_batch(problems)
    family = FAMILIES[problems[0].family]
    tokens, place = torch.from_numpy(rows), np.cumsum(mask, 1) - 1  # index within the answer
    device = model.embed_tokens.weight.device
    right = torch.stack([model(t[None, :-1].to(device))[0].argmax(-1).cpu() == t[1:] for t in tokens])
    look_up = mask & (place % family.line == family.asked)
    return {name: right[torch.from_numpy(asked[:, 1:])].double().mean().item()
            for name, asked in (("look_up", look_up), ("copy", mask & ~look_up))}


def boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...}, braces matched; None if there is none or the last one is not closed.

    Give it the model's answer alone: a \boxed in the prompt is not the model's.
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, first = 0, start + len("\\boxed{")
    for j in range(first - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[j], 0)
        if depth == 0:
            return text[first:j].strip()
    return None


def same_answer(answer: str | None, target: str) -> bool:
    """Whether two short answers agree: as integers where both are (070, 70 and 70. are one number), else as text."""
    if answer is None:
        return False

    def plain(text):
        text = text.strip().strip("$").strip().rstrip(".")
        return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else text

    return plain(answer) == plain(target)


def grade_boxed(text: str, target: str, truncated: bool) -> Outcome:
    """Grade a written-out solution by its last box (AIME, HMMT, GSM8K-style). Cut off is wrong."""
    return Outcome(text, not truncated and same_answer(boxed(text), target), truncated)


# ----------------------------------------------------------------------------- tokenizers

# GPT-2's splitter, and the same after every digit was cut out as a piece of its own (Hugging Face:
# Digits(individual_digits=True), then ByteLevel; llama.cpp: "smollm"). There a digit ends the text as
# GPT-2's pattern sees it, so blanks before a digit stay together: "a  1" -> "a", "  ", "1".
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS_AND_DIGITS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"

# tiktoken's regular expressions panic on a run of 999,024 blanks (version 0.14).
LONGEST_BLANK = 900_000


@dataclass(frozen=True)
class Tokenizer:
    """Byte-level byte-pair encoding. tiktoken's ids are merge ranks; `ids` turns them into the model's."""
    encoding: tiktoken.Encoding
    ids: np.ndarray             # model id of each rank; -1 for a byte without a token
    pieces: list[bytes]         # bytes of each model id
    specials: dict[str, int]    # every added token, the ones that Hugging Face calls special or not
    bos: int | None
    eos: int | None
    stop: tuple[int, ...]       # generation ends on any of these
    form: str | None = None     # Unicode normal form applied to text before it is split

    @property
    def size(self):
        """Number of ids that have a token: 0 … size-1. A model's logits may be padded beyond it."""
        return len(self.pieces)

    @functools.cached_property
    def special_pattern(self):
        longest_first = sorted(self.specials, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def encode(self, text: str, specials=False) -> list[int]:
        """Ids of text, no bos added. Special tokens written in it are ordinary text unless specials=True.

        Bytes for which the vocabulary has no token (SmolLM2: six control characters, the first byte
        of U+40000 … U+BFFFF) are dropped, as Hugging Face drops them; unlike there, what stood on both sides of
        one is not merged. Raises UserError for a run of more than LONGEST_BLANK blanks.
        """
        parts = self.special_pattern.split(text) if specials and self.specials else [text]
        ids = []
        for i, part in enumerate(parts):
            if i % 2:                                   # split() puts what the pattern matched at odd places
                ids.append(self.specials[part])
                continue
            if self.form:
                part = unicodedata.normalize(self.form, part)
            if len(part) > LONGEST_BLANK < max(map(len, re.findall(r"\s+", part)), default=0):
                raise UserError(f"a run of more than {LONGEST_BLANK:,} blanks: tiktoken's stack does not hold it")
            found = self.ids[self.encoding.encode_ordinary(part)]
            ids += found[found >= 0].tolist()
        return ids

    def decode_bytes(self, ids) -> bytes:
        """The exact bytes, which may end inside a character. Raises UserError for an id without a token."""
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.size:
                raise UserError(f"token id {i} has no token: ids go from 0 to {self.size - 1}")
        return b"".join(self.pieces[i] for i in ids)

    def decode(self, ids) -> str:
        """Text; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def byte_letters() -> dict[str, int]:
    """The printable letter that stands for each byte in a byte-level vocabulary: {letter: byte} (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def merge_alone(token, rank):
    """Byte-pair encoding of one string by itself -> (its parts, rank of the last merge or None)."""
    parts, last = list(token), None
    while len(parts) > 1:
        ranks = [rank.get(pair, math.inf) for pair in zip(parts, parts[1:])]
        if min(ranks) == math.inf:
            break
        last = min(ranks)
        i = ranks.index(last)
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts, last


def byte_pair_tokenizer(name, pattern, vocab, merges, specials, ignore_merges=False, **fields):
    """Tokenizer from vocab {letters: id}, merges [(left, right)] and specials {text: id}.

    tiktoken joins any two neighbours that spell a ranked token, by the token's rank; byte-pair encoding joins
    listed pairs, by the pair's rank. They agree once a token carries the rank of the merge that completes it
    when it is encoded alone, and tokens that are not completed alone carry none: what happens between two
    borders that stand does not depend on the text outside them, so such a token never arises in a text either.

    ignore_merges: a piece that is a token as a whole is taken unmerged, which tiktoken always does. Then a
    token that stays in three parts or more when alone is ranked last: no two neighbours ever spell it.

    Raises UserError for what cannot be expressed.
    """
    letters = byte_letters()
    rank = {pair: i for i, pair in enumerate(merges)}
    for left, right in rank:
        for token in (left, right, left + right):
            if token not in vocab:
                raise UserError(f"{name}: the merge {left!r} {right!r} needs the token {token!r}, "
                                "which the vocabulary lacks")

    completed, whole = [], []
    for token in vocab.keys() - specials.keys():
        if not token or not letters.keys() >= set(token):
            raise UserError(f"{name}: the token {token!r} is not written in byte-level letters")
        parts, last = merge_alone(token, rank)
        if len(parts) == 1 and last is not None:
            completed.append((last, token))
        elif ignore_merges and len(parts) == 2:
            raise UserError(f"{name}: ignore_merges with the token {token!r}, which lacks its last merge")
        elif ignore_merges and len(parts) > 2:
            whole.append(token)
    singles = sorted(letters, key=letters.get)
    ranked = singles + [token for _, token in sorted(completed)] + sorted(whole)

    def spell(token):
        return bytes(letters[letter] for letter in token)

    pieces = {i: spell(token) for token, i in vocab.items() if token not in specials}
    pieces |= {i: text.encode() for text, i in specials.items()}
    if sorted(pieces) != list(range(len(pieces))):
        raise UserError(f"{name}: the token ids are not 0 … {len(pieces) - 1}")
    encoding = tiktoken.Encoding(name, pat_str=pattern, special_tokens={},
                                 mergeable_ranks={spell(token): r for r, token in enumerate(ranked)})
    ids = np.array([-1 if token in specials else vocab.get(token, -1) for token in ranked])
    return Tokenizer(encoding, ids, [pieces[i] for i in range(len(pieces))], specials, **fields)


def gguf_tokenizer(path, splitter: str = "smollm") -> Tokenizer:
    """The tokenizer in a GGUF file's own metadata. Raises UserError unless it is SmolLM's.

    splitter 'smollm' is the model's own; 'gpt2' leaves out its digits step, as transformers' GGUF loader does.
    """
    gguf = import_gguf()
    fields = gguf.GGUFReader(path).fields

    def read(key):
        return fields[f"tokenizer.ggml.{key}"].contents() if f"tokenizer.ggml.{key}" in fields else None

    if (read("model"), read("pre")) != ("gpt2", "smollm"):
        raise UserError(f"{path}: tokenizer {read('model')!r} with splitter {read('pre')!r}; "
                        "only 'gpt2' with 'smollm' is supported")
    tokens = read("tokens")
    added = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
    specials = {token: i for i, (token, kind) in enumerate(zip(tokens, read("token_type"))) if kind in added}
    ends = (read("eos_token_id"), specials.get("<|endoftext|>"))    # end of a turn, end of a document
    return byte_pair_tokenizer(
        str(path), {"smollm": WORDS_AND_DIGITS, "gpt2": WORDS}[splitter], {token: i for i, token in enumerate(tokens)},
        [tuple(merge.split(" ")) for merge in read("merges")], specials,
        bos=read("bos_token_id"), eos=read("eos_token_id"),
        stop=tuple(dict.fromkeys(i for i in ends if i is not None)))


def splitter_pattern(path, pre_tokenizer):
    """One regular expression whose matches are the pieces of a tokenizer.json's pre_tokenizer."""
    stages = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    match [{"use_regex": True, **stage} if stage.get("type") == "ByteLevel" else stage for stage in stages]:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return WORDS
        case [{"type": "Digits", "individual_digits": True},
              {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return WORDS_AND_DIGITS
        case [{"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
              {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]:
            return rf"(?:{regex})|(?:(?!{regex})[\s\S])+"           # what lies between matches is a piece too
        case other:
            raise UserError(f"{path}: unsupported pre_tokenizer {json.dumps(other)}; supported: ByteLevel, "
                            "Digits(individual) + ByteLevel, Split(Regex, Isolated) + ByteLevel(use_regex=false)")


def hf_tokenizer(folder) -> Tokenizer:
    """The byte-level BPE of a Hugging Face folder: Qwen2, Qwen3, Llama-3, SmolLM2, GPT-2.

    Reads tokenizer.json and, where present, tokenizer_config.json (bos, eos) and generation_config.json
    (stop). Raises UserError naming whatever is missing or would be encoded differently.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{path} is missing: copy tokenizer.json, tokenizer_config.json and "
                        "generation_config.json from the model's page into this folder")
    data = read_json(path)
    model = data.get("model") or {}
    if model.get("type") != "BPE" or not {"vocab", "merges"} <= model.keys():
        raise UserError(f"{path}: unsupported model {model.get('type')!r}; only byte-level BPE is supported")
    vocab = model["vocab"]
    for option in ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise UserError(f"{path}: unsupported BPE option {option}={model[option]!r}")
    normalizer = (data.get("normalizer") or {"type": None})["type"]
    if normalizer not in (None, "NFC"):
        raise UserError(f"{path}: unsupported normalizer {normalizer!r}; only NFC or none is supported")
    for token in data.get("added_tokens", []):
        for option in ("lstrip", "rstrip", "single_word"):
            if token.get(option):
                raise UserError(f"{path}: the added token {token['content']!r} has unsupported option {option}")
    specials = {token["content"]: token["id"] for token in data.get("added_tokens", [])}
    if model.get("unk_token") and not vocab.keys() >= byte_letters().keys():
        raise UserError(f"{path}: unsupported unk_token={model['unk_token']!r} with bytes that have no token")

    def optional(name):
        return read_json(path.parent / name) if (path.parent / name).is_file() else {}

    def token_id(key):
        token = optional("tokenizer_config.json").get(key)
        token = token["content"] if isinstance(token, dict) else token
        if token is not None and token not in specials | vocab:
            raise UserError(f"{path.parent / 'tokenizer_config.json'}: {key} {token!r} is no token")
        return (vocab | specials).get(token)

    eos = token_id("eos_token")
    ends = optional("generation_config.json").get("eos_token_id")
    ends = [*(ends if isinstance(ends, list) else [ends]), eos]
    return byte_pair_tokenizer(
        str(path), splitter_pattern(path, data.get("pre_tokenizer")), vocab,
        [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]],
        specials, model.get("ignore_merges", False), bos=token_id("bos_token"), eos=eos,
        stop=tuple(dict.fromkeys(i for i in ends if i is not None)), form=normalizer)


# ----------------------------------------------------------------------------- teachers and text

ASSETS = Path(__file__).parent / "assets"
MINI_TEACHERS = {"queue": ASSETS / "mini_teacher", "recent": ASSETS / "recent_teacher", "facts": ASSETS / "facts_teacher"}


def open_teacher(name: str, splitter: str = "smollm", task: str = "queue"):
    """A teacher's weights and tokenizer: 'mini' (shipped), 'smollm2' (a package), or a Hugging Face folder.

    splitter: see `gguf_tokenizer`; it concerns smollm2 alone. task: a key of FAMILIES; it concerns mini alone.

    UserError: it is not there, with the command that brings it.
    """
    if name == "mini":
        return RunWeights(MINI_TEACHERS[task]), queue_tokenizer()
    if name == "smollm2":
        path = find_smollm2()
        return GGUFWeights(path), gguf_tokenizer(path, splitter)
    if not Path(name).is_dir():
        raise UserError(f"--teacher {name}: neither 'mini' nor 'smollm2' nor a folder that exists")
    return HFWeights(name), hf_tokenizer(name)


def read_text(path) -> str:
    """A text file's content. UserError: missing, a folder, not UTF-8, or empty."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}): convert it, for example with iconv") from None
    if not text.strip():
        raise UserError(f"{path}: the file is empty")
    return text


def read_documents(path=None) -> list[str]:
    """The documents of a text file, a JSON-lines file (its "text" fields) or a folder of both, in a fixed order.

    None: the Python standard library's own source, which every machine has. In a folder, files ending in .txt, .md,
    .py and .jsonl are read, those that are not UTF-8 or empty left out. UserError: nothing there, or a broken line.
    """
    root = Path(sysconfig.get_path("stdlib") if path is None else path)
    if not root.exists():
        raise UserError(f"--data {root}: no such file or folder")
    if root.is_file():
        return read_lines(root) if root.suffix == ".jsonl" else [read_text(root)]
    skip = {"site-packages", "test", "tests", "idle_test", "__pycache__"} if path is None else set()
    documents, left_out = [], 0
    for file in sorted(root.rglob("*")):
        if file.suffix not in (".txt", ".md", ".py", ".jsonl") or not file.is_file() or skip & set(file.parts):
            continue
        try:
            documents += read_lines(file) if file.suffix == ".jsonl" else [read_text(file)]
        except UserError as error:
            if file.suffix == ".jsonl":
                raise error
            left_out += 1
    if not documents:
        raise UserError(f"--data {root}: no text in .txt, .md, .py or .jsonl files")
    if left_out:
        print(f"note: {left_out} files of {root} are empty or not UTF-8 and were left out")
    return documents


def read_lines(path: Path) -> list[str]:
    """The "text" field of every line of a JSON-lines file. UserError names the file and the line that is broken."""
    texts = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            texts.append(json.loads(line)["text"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f'{path}:{number}: not a JSON object with a "text" field') from None
        if not isinstance(texts[-1], str):
            raise UserError(f'{path}:{number}: "text" is not a string')
    return texts


class Text:
    """Documents as one stream of token ids, the last twentieth held out.

    tokens (M) int32, document (M) int32: the document each token belongs to. Documents are shuffled once, by a
    fixed seed, and end with the tokenizer's eos where it has one.
    UserError: fewer tokens than four stretches of `length`.
    """

    def __init__(self, documents: list[str], tokenizer: Tokenizer, length: int):
        order = np.random.default_rng(0).permutation(len(documents))
        end = [] if tokenizer.eos is None else [tokenizer.eos]
        rows = [np.array(tokenizer.encode(documents[j]) + end, dtype=np.int32) for j in order]
        self.tokens = np.concatenate(rows)
        self.document = np.repeat(np.arange(len(rows), dtype=np.int32), [len(row) for row in rows])
        self.length = length
        self.held_out = len(self.tokens) - max(len(self.tokens) // 20, length + 1)
        if self.held_out < 3 * length:
            raise UserError(f"--data: {len(self.tokens)} tokens are too few for stretches of {length}: "
                            "give more text or a smaller --length")

    def stretch(self, starts) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and documents (len(starts), length + 1) from those places on."""
        index = np.asarray(starts)[:, None] + np.arange(self.length + 1)
        return self.tokens[index], self.document[index]

    def batch(self, rng: np.random.Generator, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Random stretches of the training part."""
        return self.stretch(rng.integers(0, self.held_out - self.length - 1, batch))

    def held_out_batch(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Stretches spread evenly over the held-out part, always the same."""
        return self.stretch(np.linspace(self.held_out, len(self.tokens) - self.length - 1, batch).astype(int))


def main() -> None:
    parser = Parser(description="Show a problem of the queue machine, or of a control.")
    parser.add_argument("--task", choices=FAMILIES, default="queue")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--symbols", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: must be at least 0")
    rng = np.random.default_rng(args.seed)
    problem = queue_problem(rng, args.steps, args.symbols) if args.task == "queue" else FAMILIES[args.task].draw(rng, args.steps)
    encode = queue_tokenizer().encode
    print(problem.prompt + problem.answer)
    print(f"prompt {len(encode(problem.prompt))} tokens, answer {len(encode(problem.answer))} tokens")


if __name__ == "__main__":
    cli(main)
