"""train.py: distil a student with a fixed memory from a full-attention teacher.

    python train.py --variant bifocal                        # the miniature, some minutes on a laptop CPU
    python train.py --far gdn --mix half --window 56         # any far part, any mix, any window
    python train.py --variant all                            # every row of the table, one after the other
    python train.py --variant swa_learned_sink               # its strongest simple rival, the same recipe
    python train.py --variant bifocal --teacher smollm2      # a real pretrained model on real text
    python train.py --variant bifocal --teacher DIR          # a Hugging Face folder (Qwen3, Qwen2.5, Llama)
    python train.py --variant full --teacher none            # how the shipped miniature teacher was made; --task for the others
    python train.py --variant bifocal --task facts           # another task (tasks.py): recent, facts

Stage I: every layer alone. Given the teacher's block input, the student's attention answer before W_o matches the
teacher's; loss = mean over layers of |o_student - o_teacher|^2 / |o_teacher|^2; only the new parameters train.
Stage II: the whole model. KL(teacher || student) on the graded tokens, with a share --ce of cross entropy; all
parameters train, the new ones at --lr-new.

Batches are a function of (seed, step) alone. A checkpoint is written whole or not at all; after Ctrl-C or a kill
the same command with --resume continues the same loss curve, bit for bit on one machine's CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

import fast
import reference
from reference import (BUDGET, FARS, MINI, VARIANTS, WORDS, Decoder, Parser, UserError, build, cli, is_new, memory_row, combine,
                       pick_device, rotate, solve_window, use_cores)
from tasks import (FAMILIES, LENGTHS, TRAINING, Text, drill_problem, open_teacher, queue_batch, queue_problems, read_documents,
                   reading_accuracy, solve, window_bound)
from weights import RunWeights, describe, load_weights, read_json, save_weights, write_json, write_whole

PARENT = "TRAIN_ALL_PROCESS"  # environment: the process of --variant all
PATIENCE = 5  # non-finite steps in a row before the run stops


# ----------------------------------------------------------------------------- recipes


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a step does: its lengths and rates. Each field is a flag of the same name."""

    stage1_steps: int
    steps: int
    batch: int  # sequences a step; of the queue machine, sequences of the longest problem: the tokens count
    lr1: float  # stage I: new parameters
    lr: float  # stage II: the teacher's parameters
    lr_new: float  # stage II: new parameters
    gate_bias: float  # where every mixing gate starts: sigmoid(gate_bias) of the answer is the state's
    sink_start: str  # where every learned sink starts: 'zero', or 'teacher' (see start_sinks)
    length: int = 1024  # tokens of a stretch of text


RECIPES = {
    "mini": Recipe(stage1_steps=30, steps=250, batch=8, lr1=1e-2, lr=1e-3, lr_new=3e-3,
                   gate_bias=1, sink_start="zero"),
    "none": Recipe(stage1_steps=0, steps=2000, batch=13, lr1=0, lr=3e-3, lr_new=0, gate_bias=0, sink_start="zero"),
    "text": Recipe(stage1_steps=20, steps=40, batch=1, lr1=1e-2, lr=5e-5, lr_new=2e-3,
                   gate_bias=-3, sink_start="teacher"),
}
DRILLS = 300  # first steps of a teacher's training: look-ups alone; without them they stay at chance
MUON_LR = 0.02


# ----------------------------------------------------------------------------- objectives


def stage1_loss(student: Decoder, teacher: Decoder, tokens: Tensor, segment: Tensor | None) -> Tensor:
    """Mean over layers of the squared error of the answer before W_o, relative to the teacher's. A scalar."""
    with torch.no_grad():
        context, x, pairs = teacher.context(tokens, segment), teacher.embed_tokens(tokens), []
        for block in teacher.layers:
            o = block.read(x, context)
            pairs.append((x, o))
            x = block.finish(x, o)
    context = student.context(tokens, segment)
    losses = []
    for block, (x, o) in zip(student.layers, pairs):
        error = block.read(x, context) - o
        losses.append(error.float().square().mean() / o.float().square().mean())
    return torch.stack(losses).mean()


def stage2_loss(student: Decoder, teacher: Decoder, tokens: Tensor, mask: Tensor, segment: Tensor | None, ce: float, ops) -> Tensor:
    """(13) of the graded ones of tokens (B, T+1): the models read the first T and predict the last T; mask (B, T) grades."""
    segment = None if segment is None else segment[:, :-1]
    with torch.no_grad():
        target = teacher.hidden(tokens[:, :-1], segment=segment)[mask], teacher.head_weight
    hidden = student.hidden(tokens[:, :-1], segment=segment)[mask]
    return ops.distill_loss(hidden, student.head_weight, target, tokens[:, 1:][mask], ce=ce)


def language_loss(student: Decoder, tokens: Tensor, mask: Tensor) -> Tensor:
    """Cross entropy on the graded tokens: a teacher of its own."""
    return F.cross_entropy(student.head(student.hidden(tokens[:, :-1])[mask]), tokens[:, 1:][mask])


# ----------------------------------------------------------------------------- the start


@torch.no_grad()
def start(student: Decoder, teacher: Decoder, recipe: Recipe, tokens: Tensor | None) -> None:
    """Set the new parameters that the recipe says where to start: mixing gates and learned sinks."""
    for layer in student.layers:
        if student.row.mix == "gate":
            layer.self_attn.mix_gate["bias"].fill_(recipe.gate_bias)
    if student.row.learned_sink and recipe.sink_start == "teacher":
        start_sinks(student, teacher, tokens)


def start_sinks(student: Decoder, teacher: Decoder, tokens: Tensor) -> None:
    """Each learned sink starts at the mean logit that the teacher's head gives to the first token.

    A pretrained model rests its unused attention on the first token, whose value is small; when the window loses that
    token, a logit of the same height without a value stands in for it. tokens (B, T).
    """
    context, x = teacher.context(tokens), teacher.embed_tokens(tokens)
    for theirs, ours in zip(teacher.layers, student.layers):
        y = theirs.input_layernorm(x)
        q, k = theirs.self_attn.normalise(*theirs.self_attn.project(y, y, y)[:2])
        q, k = rotate(q, context.rotary), rotate(k, context.rotary)
        first = k[:, :1].repeat_interleave(q.shape[2] // k.shape[2], dim=2)                      # (B, 1, H, D)
        ours.self_attn.sink.copy_((q * first).sum(-1)[:, 1:].float().mean((0, 1)) * q.shape[-1] ** -0.5)
        x = theirs(x, context)


# ----------------------------------------------------------------------------- data


def queue_step(seed: int, step: int, recipe: Recipe, curriculum: bool, task: str = "queue") -> tuple[Tensor, Tensor]:
    """Batch `step` of the queue machine, or of another task: tokens (B, T+1) and the graded predictions (B, T).

    The problems of a step have about the same number of steps, n to n-3 within 1..60; n is half the time uniform in
    1..63, half the time log-uniform; K is uniform in 2..16. The tokens of a step are about batch * 645 whatever n is. With `curriculum`
    (a teacher): n grows to 60; of the queue machine, drills alone at first and in a tenth of the later steps.
    """
    rng, family = np.random.default_rng([seed, TRAINING, step]), FAMILIES[task]
    tokens, drills = recipe.batch * 645, DRILLS if task == "queue" else 0
    if curriculum and drills and (step < drills or rng.random() < 0.1):
        problems = [drill_problem(rng, 64) for _ in range(max(1, tokens // 160))]
    else:
        top = 60
        if curriculum:
            top = min(60, max(2, int(60 * (step - drills) / (0.4 * recipe.steps))))
        n = int(rng.integers(1, top + 4)) if rng.random() < 0.5 else round(math.exp(rng.uniform(0, math.log(top + 3))))
        count = max(1, tokens // (family.prompt(n) + family.answer(n)))
        problems = [family.draw(rng, n) for n in np.clip(n - rng.integers(0, 4, count), 1, top)]
    rows, mask = queue_batch(problems)
    return torch.from_numpy(rows), torch.from_numpy(mask[:, 1:])


# ----------------------------------------------------------------------------- the run


class Run:
    """One training run in one folder: models, optimiser, data, log and checkpoint."""

    def __init__(self, args):
        self.args, self.row = args, combine(args.variant, args.far, args.mix, args.row)
        self.out = Path(args.out or default_out(self.row, args.teacher, args.task))
        self.task = args.task if args.teacher in ("mini", "none") else "text"
        preset = RECIPES.get(args.teacher, RECIPES["text"])
        given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Recipe)}
        self.recipe = dataclasses.replace(preset, **{k: v for k, v in given.items() if v is not None})
        if args.teacher == "none" and (args.variant != "full" or args.window or args.budget):
            raise UserError("--teacher none makes a teacher: give it --variant full, and no --budget or --window")
        if self.task != "text" and args.data:
            raise UserError("--data belongs to a text teacher: add --teacher smollm2 or --teacher DIR")
        if self.task == "text" and args.task != "queue":
            raise UserError(f"--task {args.task} belongs to the miniature: leave out --teacher {args.teacher}")
        self.device = pick_device(args.device)
        self.ops = fast if args.ops == "fast" else reference
        self.source, self.tokenizer = (None, None) if args.teacher == "none" else open_teacher(args.teacher, task=args.task)
        self.shape = MINI if self.source is None else self.source.model_shape
        self.budget = args.budget or BUDGET.get(self.shape.name, 576)
        if args.gate_bias is not None and self.row.mix != "gate":
            print(f"note: {self.row.name} has no mixing gate: --gate-bias changes nothing")
        torch.manual_seed(args.seed)
        self.student = build(self.shape, self.row, self.budget, args.window, self.ops)

    def config(self) -> dict:
        """What config.json holds: everything that shapes the run."""
        a = self.args
        return {
            "command": f"python train.py {shlex.join(sys.argv[1:])}".strip(),
            "variant": self.row.name, "teacher": a.teacher, "task": self.task, "data": a.data, "seed": a.seed,
            "problems": a.problems, "problem_seed": a.problem_seed, "budget": self.budget, "recipe": dataclasses.asdict(self.recipe),
            "ce": a.ce, "ops": a.ops,
            "device": self.device.type, "threads": torch.get_num_threads(), **describe(self.student),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
            "commit": git_commit(), "date": time.strftime("%Y-%m-%d"), "machine": machine(),
        }

    def claim_folder(self) -> bool:
        """Whether the run folder may be ours; nothing is written yet. False: the very same run is already finished there.

        UserError: it holds another configuration, or an unfinished run and no --resume. Nothing is overwritten.
        """
        mine = json.loads(json.dumps(self.config()))
        # what may differ between a run and its resumption
        free = ("command", "versions", "commit", "date", "machine", "threads", "problems", "problem_seed")
        if (self.out / "config.json").exists():
            old = read_json(self.out / "config.json")
            for key in mine:
                if key not in free and old.get(key) != mine[key]:
                    what = key if not isinstance(mine[key], dict) else next(
                        (f"{key} {k}" for k in mine[key] if (old.get(key) or {}).get(k) != mine[key][k]), key)
                    raise UserError(f"{self.out} holds a run with another {what} ({find(old, what)}, not {find(mine, what)}): "
                                    "choose another --out, or give the same flags")
            if (self.out / "metrics.json").exists():
                return False
            if (self.out / "checkpoint" / "state.pt").exists() and not self.args.resume:
                raise UserError(f"{self.out} holds an unfinished run: add --resume to continue it, or choose another --out")
        elif self.out.exists() and (not self.out.is_dir() or any(p.name[0] != "." for p in self.out.iterdir())):
            raise UserError(f"--out {self.out}: there is something else in the way: choose another --out")
        elif self.args.resume:
            print(f"note: nothing to resume in {self.out}: starting at the beginning")
        return True

    # -- setting up

    def prepare(self) -> None:
        """Load the teacher, give the student its weights, make the data ready."""
        self.teacher = None
        if self.source is not None:
            load_weights(self.student, self.source)
            self.teacher = build(self.shape, "full", ops=self.ops)
            load_weights(self.teacher, self.source)
            self.teacher.eval().requires_grad_(False)
            self.teacher.to(self.device, torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.student.to(self.device)
        if self.task == "text":
            documents = read_documents(self.args.data)
            self.text = Text(documents, self.tokenizer, self.recipe.length)
            print(f"data: {len(documents)} documents, {len(self.text.tokens):,} tokens, "
                  f"{len(self.text.tokens) - self.text.held_out:,} of them held out")
        if self.teacher is not None:
            self.start(self.student)

    def start(self, student: Decoder) -> None:
        """The recipe's start for a student that holds the teacher's weights."""
        start(student, self.teacher, self.recipe, self.batch(0, "I")[0])

    def stages(self) -> list[str]:
        """The stage of every step."""
        return ["language"] * self.recipe.steps if self.teacher is None else (
            ["I"] * self.recipe.stage1_steps * any(map(is_new, dict(self.student.named_parameters())))
            + ["II"] * self.recipe.steps)

    def optimizers(self, stage: str) -> list[torch.optim.Optimizer]:
        """Fresh optimisers for a stage, each group with its peak rate in `peak`; what does not train is frozen."""
        named = list(self.student.named_parameters())
        for name, p in named:
            p.requires_grad_(stage != "I" or is_new(name))
        new, old = [p for n, p in named if is_new(n)], [p for n, p in named if not is_new(n)]
        adam = dict(betas=(0.9, 0.95), weight_decay=0.0)
        if stage == "I":
            groups = [torch.optim.AdamW(new, lr=self.recipe.lr1, **adam)]
        elif stage == "II":
            sets = [{"params": old, "lr": self.recipe.lr}, {"params": new, "lr": self.recipe.lr_new}]
            groups = [torch.optim.AdamW([s for s in sets if s["params"]], **adam)]
        else:  # Muon on the hidden matrices, AdamW on the embedding and the norms
            matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
            rest = [p for n, p in named if p.ndim != 2 or "embed" in n]
            groups = [torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.0), torch.optim.AdamW(rest, lr=self.recipe.lr, **adam)]
        for o in groups:
            for group in o.param_groups:
                group["peak"] = group["lr"]
        return groups

    def batch(self, step: int, stage: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """The data of a step: tokens (B, T+1), graded predictions (B, T), documents (B, T+1) or None."""
        if self.task != "text":
            tokens, mask = queue_step(self.args.seed, step, self.recipe, stage == "language", self.task)
            return tokens.to(self.device), mask.to(self.device), None
        rng = np.random.default_rng([self.args.seed, TRAINING, step])
        tokens, segment = (torch.from_numpy(x).long().to(self.device) for x in self.text.batch(rng, self.recipe.batch))
        return tokens, segment[:, 1:] == segment[:, :-1], segment

    def loss(self, step: int, stage: str) -> tuple[Tensor, int]:
        """The loss of a step and how many tokens it read."""
        tokens, mask, segment = self.batch(step, stage)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            if stage == "language":
                loss = language_loss(self.student, tokens, mask)
            elif stage == "I":
                loss = stage1_loss(self.student, self.teacher, tokens, segment)
            else:
                loss = stage2_loss(self.student, self.teacher, tokens, mask, segment, self.args.ce, self.ops)
        return loss, tokens[:, 1:].numel()

    # -- checkpoints

    def save(self, step: int, optimizers, skipped: int) -> None:
        """The state after `step` steps, written whole."""
        state = {"step": step, "student": self.student.state_dict(), "optimizers": [o.state_dict() for o in optimizers],
                 "skipped": skipped}
        write_whole(self.out / "checkpoint" / "state.pt", lambda path: torch.save(state, path))

    def restore(self, stages: list[str]) -> tuple[int, list, int]:
        """Continue from the checkpoint if there is one: the step, the optimisers, the skipped steps so far."""
        file = self.out / "checkpoint" / "state.pt"
        if not file.exists():
            (self.out / "log.jsonl").unlink(missing_ok=True)
            return 0, self.optimizers(stages[0]) if stages else [], 0
        try:
            state = torch.load(file, map_location=self.device, weights_only=True)
        except Exception as error:
            raise UserError(f"{file}: the checkpoint cannot be read ({type(error).__name__}): delete it to start over") from None
        step = state["step"]
        self.student.load_state_dict(state["student"])
        optimizers = self.optimizers(stages[step - 1])
        for o, saved in zip(optimizers, state["optimizers"]):
            o.load_state_dict(saved)
        log = self.out / "log.jsonl"
        lines = log.read_text().splitlines()[:step] if log.exists() else []
        write_whole(self.out / "log.jsonl", lambda p: p.write_text("".join(line + "\n" for line in lines)))
        print(f"resuming {self.out} after step {step} of {len(stages)}")
        return step, optimizers, state["skipped"]

    # -- the loop

    def train(self) -> bool:
        """Train to the end: True. Interrupted: the state is saved and the answer is False."""
        stages = self.stages()
        start, optimizers, skipped = self.restore(stages)
        interrupted = Interrupt()
        row, bad, began, tokens_read = self.row, 0, time.time(), 0
        log = open(self.out / "log.jsonl", "a", encoding="utf-8")
        bar = tqdm(range(start, len(stages)), initial=start, total=len(stages), desc=row.name, unit="step",
                   mininterval=0.5 if sys.stderr.isatty() else 20, dynamic_ncols=True)
        with log, bar, interrupted:
            for step in bar:
                stage = stages[step]
                first = stages.index(stage)
                if step == first and step > 0:
                    optimizers = self.optimizers(stage)
                share = rate_share(step - first, stages.count(stage))
                for group in (g for o in optimizers for g in o.param_groups):
                    group["lr"] = group["peak"] * share
                loss, tokens = self.loss(step, stage)
                for o in optimizers:
                    o.zero_grad(set_to_none=True)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_([p for p in self.student.parameters() if p.requires_grad], 1.0)
                if math.isfinite(loss.item()) and math.isfinite(norm.item()):
                    bad = 0
                    for o in optimizers:
                        o.step()
                else:  # the step is not applied
                    bad, skipped = bad + 1, skipped + 1
                tokens_read += tokens
                rate = tokens_read / (time.time() - began)
                log.write(json.dumps({"step": step, "stage": stage, "loss": number(loss), "lr": optimizers[-1].param_groups[0]["lr"],
                                      "grad_norm": number(norm), "tokens": tokens, "tokens_per_s": round(rate),
                                      "skipped": skipped, "memory_mb": round(peak_memory() / 2**20)}) + "\n")
                log.flush()
                bar.set_postfix_str(f"stage {stage} loss {loss.item():.4f} lr {optimizers[-1].param_groups[0]['lr']:.1e} "
                                    f"{rate:,.0f} tok/s", refresh=False)
                if bad == PATIENCE:
                    raise UserError(f"loss or gradient was not finite {PATIENCE} times in a row at step {step}: the last good "
                                    f"checkpoint is in {self.out / 'checkpoint'}; try a smaller --lr")
                if (bad == 0 and (step + 1) % self.args.checkpoint_every == 0) or interrupted.seen:
                    self.save(step + 1, optimizers, skipped)
                if interrupted.seen:
                    return False
        if not all(p.isfinite().all() for p in self.student.parameters()):
            raise UserError(f"{self.out}: weights are not finite after the last step, so there is no student; try a smaller --lr")
        save_weights(self.out / "student.safetensors", self.student)
        return True


def default_out(row, teacher: str, task: str = "queue") -> str:
    """runs/VARIANT, and behind it the teacher's name or the task unless that is the miniature's, or the queue machine."""
    more = task if teacher in ("mini", "none") else Path(teacher).resolve().name
    return f"runs/{row.name}" + ("" if more == "queue" else f"-{more}")


def number(x: Tensor) -> float | None:
    """A scalar for JSON, which has no NaN and no infinity."""
    return x.item() if math.isfinite(x.item()) else None


@contextlib.contextmanager
def locked(folder: Path):
    """Hold a run folder against a second process, until this one ends however it ends. UserError: another holds it."""
    if fcntl is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written ({error.strerror}): choose another --out") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise UserError(f"{folder} is being trained by process {file.read().strip() or '?'}: wait for it, or choose another "
                            "--out") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


class Interrupt:
    """Ctrl-C ends the step first, so that what is saved is whole; so does the end of the --variant all that started us. A second Ctrl-C
    ends at once."""

    def __enter__(self):
        self.asked, self.parent, self.old = False, os.environ.get(PARENT), signal.signal(signal.SIGINT, self.handle)
        return self

    @property
    def seen(self) -> bool:
        return self.asked or self.parent is not None and os.getppid() != int(self.parent)

    def handle(self, *_):
        self.asked = True
        signal.signal(signal.SIGINT, self.old)

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self.old)


def rate_share(step: int, steps: int) -> float:
    """The share of the peak rate: a warm-up over the first twentieth, then linear to zero over the last three fifths."""
    return min(1.0, (step + 1) / max(1, steps // 20), (steps - step) / max(1, 0.6 * steps))


def find(config: dict, what: str):
    """The value at 'key' or 'key subkey' of a configuration."""
    for key in what.split(" "):
        config = (config or {}).get(key)
    return config


def git_commit() -> str | None:
    """The commit of this code, if git knows one."""
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.strip() or None


def machine() -> str:
    """The kind of machine, in words."""
    return f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores" + (
        f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "")


def peak_memory() -> int:
    """The process's peak resident bytes; 0 where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == "darwin" else kilobytes * 1024


# ----------------------------------------------------------------------------- what was made


def evaluate_queue(run: Run) -> dict:
    """Answer problems of each length and say what decoding held."""
    result, held = {"lengths": {}}, 0
    for n in tqdm(LENGTHS, desc="answers", unit="length", leave=False):
        problems = queue_problems(run.args.problems, n, run.args.problem_seed, family=run.task)
        outcomes, held = solve(run.student, problems)
        bound = None if run.student.window is None else float(np.mean([window_bound(p, run.student.window) for p in problems]))
        result["lengths"][str(n)] = {"n": len(problems), "exact": float(np.mean([o.exact for o in outcomes])),
                                "truncated": int(sum(o.truncated for o in outcomes)), "window_bound": bound}
    read = reading_accuracy(run.student, queue_problems(min(50, run.args.problems), LENGTHS[-1], run.args.problem_seed, family=run.task))
    return result | read | {"bytes_per_layer": held}


def report_queue(run: Run, result: dict) -> None:
    """The table, one answer, the memory, the next commands."""
    teacher = {} if run.source is None else read_json(run.source.path / "metrics.json")["lengths"]
    print(f"\nexact match, {result['lengths']['2']['n']} problems a length, greedy\n{'answer tokens':>16} {'student %':>10} {'cut off':>8}"
          f" {'teacher %':>10} {'window bound %':>15}")
    for n, r in result["lengths"].items():
        cell = "-" if n not in teacher else f"{100 * teacher[n]['exact']:.1f}"
        bound = "-" if r["window_bound"] is None else f"{100 * r['window_bound']:.1f}"
        print(f"{FAMILIES[run.task].answer(int(n)):>16} {100 * r['exact']:>10.1f} {r['truncated']:>8} {cell:>10} {bound:>15}")
    if run.student.window:
        print(f"The window bound is what the best reader of {run.student.window} tokens alone could score.")
    print(f"While reading the right answers of {FAMILIES[run.task].answer(LENGTHS[-1])} tokens, right: "
          f"{100 * result['look_up']:.1f} % of the look-ups, "
          f"{100 * result['copy']:.1f} % of the rest")
    problem = queue_problems(1, 4, family=run.task)[0]
    outcome = solve(run.student, [problem])[0][0]
    print(f"\none answer ({'right' if outcome.exact else 'wrong'}):\n{problem.prompt}{outcome.text}\n")
    if run.row.window is None:
        print(f"memory: decoding held {result['bytes_per_layer']:,} bytes a layer, and more with every token")
    else:
        table = memory_row(run.shape, run.row, None if run.args.window else run.budget, run.student.window)
        print(f"memory: decoding held {result['bytes_per_layer']:,} bytes a layer; the accounting says "
              f"{table['bytes_per_layer']:,}: {table['tokens_nominal']:.2f} tokens nominal, {table['tokens_exact']:.2f} with "
              f"every byte, of a budget of {run.budget}" + (": exceeded" if table["tokens_nominal"] > run.budget else ""))


@torch.no_grad()
def held_out_loss(model: Decoder, text: Text, from_position: int, count: int = 8) -> float | None:
    """Mean next-token loss on held-out text at positions >= from_position of its stretches; None if there are none."""
    total, number = 0.0, 0
    for j in range(count):
        tokens, document = (torch.from_numpy(x[j : j + 1]).long().to(model.embed_tokens.weight.device)
                            for x in text.held_out_batch(count))
        logits = model(tokens[:, :-1], segment=document[:, :-1]).float()
        mask = (document[:, 1:] == document[:, :-1])
        mask[:, :from_position] = False
        total += F.cross_entropy(logits[mask], tokens[:, 1:][mask], reduction="sum").item()
        number += int(mask.sum())
    return total / number if number else None


def evaluate_text(run: Run) -> dict:
    """Held-out loss of the teacher, of an untrained window with sinks of the same budget, of the student before and after."""
    past = min(run.budget, run.recipe.length // 2)
    models = {"teacher": run.teacher, "swa_sink_tokens, untrained": build(run.shape, "swa_sink_tokens", run.budget, ops=run.ops),
              f"{run.row.name}, untrained": build(run.shape, run.row, run.budget, run.args.window, run.ops)}
    result = {}
    for name, model in tqdm((models | {f"{run.row.name}, trained": run.student}).items(), desc="held-out text", leave=False):
        if "untrained" in name:
            load_weights(model.to(run.device), run.source)
            run.start(model)
        result[name] = {"all": held_out_loss(model, run.text, 0), f"{past}:": held_out_loss(model, run.text, past)}
    return {"held_out_loss": result}


def report_text(run: Run, result: dict) -> None:
    """The held-out losses."""
    rows = result["held_out_loss"]
    ranges = list(next(iter(rows.values())))
    print(f"\nmean next-token loss on held-out text, by position in stretches of {run.recipe.length} tokens")
    print(f"{'':<32}" + "".join(f"{r:>10}" for r in ranges))
    for name, losses in rows.items():
        print(f"{name:<32}" + "".join(f"{'-':>10}" if losses[r] is None else f"{losses[r]:>10.4f}" for r in ranges))


def resume_command(run: Run) -> str:
    """The command that continues a run."""
    return run.config()["command"].replace(" --resume", "") + " --resume"


def train_and_evaluate(run: Run, evaluate) -> dict | None:
    """The whole run in its locked folder; None if interrupted."""
    new = not run.out.exists()
    try:
        with locked(run.out):
            try:
                run.prepare()
            except KeyboardInterrupt:
                print("interrupted before the first step: nothing is changed")
                return None
            if not (run.out / "config.json").exists():
                write_json(run.out / "config.json", run.config())
            window = {None: "every token in reach", False: "no window"}.get(run.row.window, f"window {run.student.window}")
            print(f"{run.row.name}: {run.row.note}; {window}, "
                  f"{sum(p.numel() for p in run.student.parameters()):,} parameters, "
                  f"{sum(p.numel() for n, p in run.student.named_parameters() if is_new(n)):,} of them new; "
                  f"{run.device.type}, {run.args.ops} ops -> {run.out}")
            if not run.train():
                print(f"interrupted: the state is saved; continue with: {resume_command(run)}")
                return None
            run.student.eval()
            try:
                result = evaluate(run)
            except KeyboardInterrupt:
                print(f"interrupted while answering; the student is whole; go on with: {resume_command(run)}")
                return None
            write_json(run.out / "metrics.json", result)
            shutil.rmtree(run.out / "checkpoint", ignore_errors=True)
            return result
    finally:
        if new and run.out.is_dir() and not (run.out / "config.json").exists():  # a failed start leaves nothing
            shutil.rmtree(run.out, ignore_errors=True)


def run_command(args) -> int:
    """Train, evaluate, report. Returns the exit status."""
    use_cores()
    run = Run(args)
    evaluate, report = (evaluate_text, report_text) if run.task == "text" else (evaluate_queue, report_queue)
    if run.claim_folder():
        result = train_and_evaluate(run, evaluate)
        if result is None:
            return 130
    else:
        print(f"{run.out} is finished already; delete it or choose another --out to train anew")
        load_weights(run.student, RunWeights(run.out))
        result = read_json(run.out / "metrics.json")
    report(run, result)
    print("\nnext:")
    if run.task != "text":
        other = combine("swa_learned_sink" if args.variant != "swa_learned_sink" else "bifocal")
        task = "" if run.task == "queue" else f" --task {run.task}"
        print(f"    python train.py --variant {other.name}{task}\n"
              f"    python eval.py answers {run.out} {default_out(other, args.teacher, run.task)}\n    python reference.py")
    else:
        print(f"    python eval.py text {run.out} --text FILE")
    print(json.dumps({"out": str(run.out), **result}))
    return 0


# ----------------------------------------------------------------------------- every variant


ALL = {"stage1_steps": 15, "steps": 120, "problems": 100}  # the shorter recipe of --variant all, alike for all rows


def all_rows(shape, budget: int) -> list[str]:
    """The variants that --variant all trains: all but the teacher and those strict twins whose window is their row's own."""
    def window(name):
        return solve_window(shape, VARIANTS[name], budget)
    return [name for name, row in VARIANTS.items()
            if name != "full" and not (row.strict and window(name) == window(name.removesuffix("_strict")))]


def train_all(args) -> int:
    """Train every variant in a process of its own, --jobs at a time, finished ones not again; then one table. Exit status."""
    if args.teacher != "mini" or args.task != "queue" or args.far or args.mix or args.row or args.window:
        raise UserError("--variant all is the miniature's table: leave out --teacher, --task, --far, --mix, --row and --window")
    root, names = Path(args.out or "runs/all"), all_rows(MINI, args.budget or BUDGET["mini"])
    jobs = args.jobs or (1 if pick_device(args.device).type == "cuda" else os.cpu_count() or 1)
    given = {flag: getattr(args, flag) for flag in (
        "budget", "steps", "stage1_steps", "batch", "lr", "lr_new", "lr1", "gate_bias", "sink_start", "ce", "seed",
        "checkpoint_every", "problems", "device", "ops")}
    given |= {k: v for k, v in ALL.items() if given[k] is None}
    with table_folder(root, given):
        flags = [f"--{k.replace('_', '-')}={v}" for k, v in given.items() if v is not None]
        failed = train_runs(root, {name: ["--variant", name, *flags] for name in names}, jobs, "variants")
    if failed is None:
        print("interrupted: finished rows stay, the others continue where they stopped; the same command goes on", file=sys.stderr)
        return 130
    report_all(root, [name for name in names if name not in failed])
    for name, line in failed.items():
        print(f"{name} failed: {line} (see {root / name}.txt)", file=sys.stderr)
    return 1 if failed else 0


@contextlib.contextmanager
def table_folder(root: Path, flags: dict):
    """Hold a folder of runs made with these flags. UserError: it is one run's folder, or was made with others."""
    if (root / "config.json").exists():
        raise UserError(f"{root} is the folder of one run: choose another --out")
    if (root / "all.json").exists():
        for flag, value in read_json(root / "all.json").items():
            if flags.get(flag) != value:
                raise UserError(f"{root} holds runs of --{flag.replace('_', '-')} {value}, not {flags.get(flag)}: choose another --out")
    with locked(root):
        write_json(root / "all.json", flags)
        yield


def finished(folder: Path) -> bool:
    """Whether a run folder holds a whole run."""
    try:
        return bool(read_json(folder / "config.json") and read_json(folder / "metrics.json"))
    except UserError:
        return False


def train_runs(root: Path, runs: dict[str, list[str]], jobs: int, title: str) -> dict[str, str] | None:
    """Train what is not finished of `runs`, name -> flags, each in the folder of its name and a process of its own, what it prints in
    NAME.txt: the last line of each that failed, or None if interrupted."""
    waiting = [name for name in runs if not finished(root / name)]
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    running, failed = {}, {}

    def stop(*_):
        raise KeyboardInterrupt
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), stop)
    try:
        with tqdm(total=len(runs), initial=len(runs) - len(waiting), desc=title, unit="run") as bar:
            while waiting or running:
                while waiting and len(running) < jobs:
                    name = waiting.pop(0)
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    with open(root / f"{name}.txt", "w", encoding="utf-8") as out:
                        running[name] = subprocess.Popen(
                            [sys.executable, __file__, *runs[name], "--out", str(root / name), "--resume"],
                            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,  # Ctrl-C reaches us alone, and each child once
                            env=os.environ | {"OMP_NUM_THREADS": threads, PARENT: str(os.getpid())})
                time.sleep(0.2)
                for name, child in list(running.items()):
                    if child.poll() is not None:
                        del running[name]
                        if child.returncode:
                            failed[name] = (root / f"{name}.txt").read_text(encoding="utf-8").strip().split("\n")[-1]
                        else:
                            bar.update()
                bar.set_postfix_str(" ".join(running) + (f"; failed: {' '.join(failed)}" if failed else ""), refresh=False)
    except KeyboardInterrupt:
        for child in running.values():
            child.send_signal(signal.SIGINT)
        for child in running.values():
            child.wait()
        return None
    return failed


def train_suite(args, parser) -> int:
    """The experiment of finding.py: the rates by a small grid, then every student. Exit status."""
    import finding
    if args.quick and not args.suite:
        raise UserError("--quick belongs to --suite finding")
    allowed = {"suite", "quick", "out", "jobs", "device", "resume"}
    for name, value in vars(args).items():
        if name not in allowed and value != parser.get_default(name):
            raise UserError(f"--suite finding fixes --{name.replace('_', '-')}: leave it out; with it go "
                            + " ".join(f"--{flag}" for flag in sorted(allowed - {"suite"})))
    root = Path(args.out or ("runs/finding-quick" if args.quick else "runs/finding"))
    jobs = args.jobs or (1 if pick_device(args.device).type == "cuda" else os.cpu_count() or 1)
    with table_folder(root, {"suite": args.suite, "quick": args.quick, "device": args.device}):
        for title, runs in finding.stages(root, args.quick):
            failed = train_runs(root, {name: [*flags, "--device", args.device] for name, flags in runs.items()}, jobs, title)
            if failed is None:
                print("interrupted: what is finished stays; the same command goes on", file=sys.stderr)
                return 130
            if failed:
                for name, line in failed.items():
                    print(f"{name} failed: {line} (see {root / name}.txt)", file=sys.stderr)
                return 1
    print(f"every student is trained; now: python eval.py finding{' --quick' if args.quick else ''}"
          + (f" --runs {root}" if args.out else ""))
    return 0


def report_all(root: Path, names: list[str]) -> None:
    """One line a variant: short is n = 2 and 4, long n = 32 and 60, in % exact; the last line is JSON."""
    rows = []
    for name in names:
        config, metrics = read_json(root / name / "config.json"), read_json(root / name / "metrics.json")
        rate = [json.loads(line)["tokens_per_s"] for line in (root / name / "log.jsonl").read_text(encoding="utf-8").splitlines()][-1]
        exact = {n: r["exact"] for n, r in metrics["lengths"].items()}
        rows.append({"name": name, "window": config["window"], "bytes_per_layer": metrics["bytes_per_layer"],
                     "short": (exact["2"] + exact["4"]) / 2, "long": (exact["32"] + exact["60"]) / 2,
                     "look_up": metrics["look_up"], "copy": metrics["copy"], "tokens_per_s": rate, "seeds": 1})
    print(f"{'variant':<22}{'window':>7}{'B/layer':>9}{'short %':>9}{'long %':>8}{'look-up %':>11}{'copy %':>8}{'train tok/s':>12}")
    for r in rows:
        print(f"{r['name']:<22}{r['window'] or '-':>7}{r['bytes_per_layer']:>9,}{100 * r['short']:>9.1f}{100 * r['long']:>8.1f}"
              f"{100 * r['look_up']:>11.1f}{100 * r['copy']:>8.1f}{r['tokens_per_s']:>12,}")
    print(json.dumps({"out": str(root), "variants": rows}))


def main() -> None:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what")
    what.add_argument("--variant", default="bifocal", choices=(*VARIANTS, "all"), metavar="NAME",
                      help=f"the student: {' '.join(VARIANTS)}; or all, one after the other with a shorter recipe, into one table")
    what.add_argument("--suite", choices=("finding",),
                      help="every student of an experiment, as finding.py says; then: python eval.py finding")
    what.add_argument("--quick", action="store_true", help="with --suite: one seed of the four students, no tuning")
    what.add_argument("--teacher", default="mini", help="mini, smollm2, a Hugging Face folder, or none (default mini)")
    what.add_argument("--task", choices=FAMILIES, default="queue", help="what the miniature learns (python tasks.py --task NAME shows one)")
    what.add_argument("--data", help="text: a file, a .jsonl file or a folder (default: Python's standard library)")
    what.add_argument("--budget", type=int, help="tokens of memory a layer (default 72 for mini, else 576)")
    what.add_argument("--window", type=int, help="W, instead of the window that spends the budget")
    what.add_argument("--far", choices=("none", *FARS), metavar="NAME",
                      help=f"another far part for the variant, with its state_per: none {' '.join(FARS)}")
    what.add_argument("--mix", choices=("none", *filter(None, WORDS["mix"])), help="another mix of window and state")
    what.add_argument("--row", action="append", default=[], metavar="FIELD=VALUE",
                      help="change a field of the variant's row or its far part (python reference.py --explain NAME)")
    how = parser.add_argument_group("how (defaults depend on the teacher)")
    how.add_argument("--steps", type=int, help="steps of stage II")
    how.add_argument("--stage1-steps", type=int, help="steps of stage I")
    how.add_argument("--batch", type=int, help="sequences a step; of the queue machine, batch * 645 tokens a step")
    how.add_argument("--length", type=int, help="tokens of a stretch of text")
    how.add_argument("--lr", type=float, help="peak rate of the teacher's parameters in stage II")
    how.add_argument("--lr-new", type=float, help="peak rate of the new parameters in stage II")
    how.add_argument("--lr1", type=float, help="peak rate of stage I")
    how.add_argument("--gate-bias", type=float, help="where mixing gates start")
    how.add_argument("--sink-start", choices=("zero", "teacher"), help="where learned sinks start")
    how.add_argument("--ce", type=float, default=0.0, help="share of cross entropy in stage II (default 0)")
    how.add_argument("--seed", type=int, default=0)
    where = parser.add_argument_group("where")
    where.add_argument("--out", help="run folder (default runs/VARIANT)")
    where.add_argument("--resume", action="store_true", help="continue the run in --out")
    where.add_argument("--checkpoint-every", type=int, default=25, metavar="STEPS")
    where.add_argument("--problems", type=int, help="problems of each length to answer at the end (default 200)")
    where.add_argument("--problem-seed", type=int, default=0, help="seed of those problems (default 0)")
    where.add_argument("--jobs", type=int, help="with --variant all or --suite: trainings at a time (default: one a core)")
    where.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    where.add_argument("--ops", choices=("fast", "reference"), default="fast")
    args = parser.parse_args()
    for flag, least in (("budget", 1), ("window", 1), ("steps", 1), ("stage1_steps", 0), ("batch", 1), ("length", 2), ("seed", 0),
                        ("problem_seed", 0), ("checkpoint_every", 1), ("problems", 1), ("jobs", 1), ("lr", 0), ("lr_new", 0),
                        ("lr1", 0), ("ce", 0)):
        if getattr(args, flag) is not None and not getattr(args, flag) >= least:
            raise UserError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be at least {least}")
    for flag in ("lr", "lr_new", "lr1", "gate_bias"):
        if not math.isfinite(getattr(args, flag) or 0):
            raise UserError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be a finite number")
    if args.ce > 1 or args.seed >= 2**63:
        raise UserError(f"--ce {args.ce}: a share, from 0 to 1" if args.ce > 1 else f"--seed {args.seed}: must be below 2^63")
    if args.suite or args.quick:
        raise SystemExit(train_suite(args, parser))
    if args.variant == "all":
        raise SystemExit(train_all(args))
    args.problems = args.problems or 200
    raise SystemExit(run_command(args))


if __name__ == "__main__":
    cli(main)
