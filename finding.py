"""finding.py: the experiment. Under 72 tokens of memory, who writes long answers right?

    python train.py --suite finding     # what is missing of: the rates by a small grid, then every student
    python eval.py finding              # answers, causal checks, reach, analysis, figures -> assets/finding.json
    python finding.py                   # tables and figures again from assets/finding.json: nothing is trained

The plan was written before the runs: NOTES.md, "The finding: the plan". The unit is the problem; all models answer the same ones; seeds
are the second level of the bootstrap.
"""

from __future__ import annotations

import contextlib
import functools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import fast
from reference import MINI, VARIANTS, Decoder, Parser, UserError, cli, memory_row, sight
from tasks import ASSETS, FAMILIES, LENGTHS, SYMBOLS, queue_batch, queue_problems, queue_tokenizer, solve, window_bound
from weights import load_run, load_weights, read_json, write_json

RESULT = ASSETS / "finding.json"
BUDGET = 72
PROBLEMS = 400  # of each length
POOLS = {"short": (2, 4), "long": (32, 60)}
RESAMPLES = 10_000


@dataclass(frozen=True)
class Student:
    """A student of the experiment: its flags, how many seeds, whose rates it takes, and its colour."""

    flags: tuple[str, ...]
    seeds: int = 1
    rates_of: str | None = None  # None: tuned by itself
    task: str = "queue"
    colour: str = "#999999"
    note: str = ""


STUDENTS = {
    "swa_learned_sink": Student((), 3, colour="#d95f02", note="window 72"),
    "swa_sink_tokens": Student((), 3, colour="#e6ab02", note="window 68 and four sink tokens"),
    "bifocal": Student((), 3, colour="#1b6ca8", note="window 56 and a state of 16"),
    "bifocal_state": Student((), 3, colour="#7570b3", note="window 8 and a state of 64"),
    "window_56": Student(("--variant", "swa_learned_sink", "--window", "56"), 3, colour="#f4a582", note="bifocal's window, no state"),
    "bifocal_strict": Student((), 1, "bifocal", note="window 54: every byte counted"),
    "bifocal_state_strict": Student((), 1, "bifocal_state", note="window 3: every byte counted"),
    "swa": Student((), note="window 72, no sink"),
    "liger_gla": Student((), note="half a window of 56, half a state"),
    "rad_rwkv7": Student((), note="a state alone"),
}
FOUR = ("swa_learned_sink", "swa_sink_tokens", "bifocal", "bifocal_state")
for _task in ("recent", "facts"):
    for _name in ("swa_learned_sink", "bifocal"):
        STUDENTS[f"{_task}/{_name}"] = Student(("--variant", _name, "--task", _task), 3, _name, _task, STUDENTS[_name].colour)

RATES = {"lr": 1e-3, "lr_new": 3e-3}  # the recipe's
GRID = (0.5, 1.0, 2.0)  # times the recipe's rates of stage II
TRIAL = ("--steps", "100", "--seed", "100", "--problems", "50", "--problem-seed", "1")  # a trial: shorter, on problems of its own


# ----------------------------------------------------------------------------- what is trained


def flags_of(name: str, scale: float) -> list[str]:
    """The flags of a student at rates `scale` times the recipe's."""
    return [*(STUDENTS[name].flags or ("--variant", name)), "--budget", str(BUDGET),
            *(part for rate, value in RATES.items() for part in (f"--{rate.replace('_', '-')}", repr(value * scale)))]


def stages(root: Path, quick: bool):
    """What to train, one stage after the other: (title, {folder below root: flags}). The second stage reads what the first found."""
    if quick:
        yield "students", {f"{name}/seed0": [*flags_of(name, 1.0), "--problems", "20"] for name in FOUR}
        return
    tuned = [name for name, s in STUDENTS.items() if s.rates_of is None]
    yield "trials", {trial(name, scale): [*flags_of(name, scale), *TRIAL] for name in tuned for scale in GRID}
    best = choose_rates(root)
    yield "students", {f"{name}/seed{seed}": [*flags_of(name, best[s.rates_of or name]["scale"]), "--seed", str(seed), "--problems", "20"]
                       for name, s in STUDENTS.items() for seed in range(s.seeds)}


def trial(name: str, scale: float) -> str:
    """The folder of a trial."""
    return f"trials/{name}-x{scale:g}"


def choose_rates(root: Path) -> dict[str, dict]:
    """Of each tuned student the scale with the most answers right on the trials' problems, ties by what is right while reading:
    {"scale", "trials": {scale: (exact, reading)}}."""
    found = {}
    for name in (name for name, s in STUDENTS.items() if s.rates_of is None):
        scores = {}
        for scale in GRID:
            m = read_json(root / trial(name, scale) / "metrics.json")
            scores[scale] = (float(np.mean([r["exact"] for r in m["lengths"].values()])), (m["look_up"] + m["copy"]) / 2)
        found[name] = {"scale": max(scores, key=scores.get), "trials": {f"{scale:g}": s for scale, s in scores.items()}}
    return found


# ----------------------------------------------------------------------------- answers


def answer(folder: Path, count: int, device) -> dict:
    """What a trained student answers, kept beside it: right or wrong of every problem of every length as a string of 1 and 0."""
    file = folder / f"outcomes-{count}.json"
    if file.exists():
        return read_json(file)
    model, source = load_run(folder, fast, device)
    result = {"window": model.window, "parameters": sum(p.numel() for p in model.parameters()), "lengths": {}}
    for n in tqdm(LENGTHS, desc=str(folder), unit="length", leave=False):
        problems = queue_problems(count, n, family=source.config["task"])
        outcomes, result["bytes_per_layer"] = solve(model, problems)
        result["lengths"][str(n)] = {
            "exact": "".join(str(int(o.exact)) for o in outcomes), "truncated": sum(o.truncated for o in outcomes),
            "window_bound": None if model.window is None else float(np.mean([window_bound(p, model.window) for p in problems]))}
    write_json(file, result)
    return result


def trained(root: Path, quick: bool) -> dict[str, list[Path]]:
    """The run folders of every student, all of them finished. UserError: one is missing."""
    folders = {name: [root / name / f"seed{seed}" for seed in range(1 if quick else STUDENTS[name].seeds)]
               for name in (FOUR if quick else STUDENTS)}
    for paths in folders.values():
        for path in paths:
            if not (path / "metrics.json").exists():
                raise UserError(f"{path}: not trained yet: python train.py --suite finding{' --quick' if quick else ''} trains what is "
                                "missing")
    return folders


# ----------------------------------------------------------------------------- statistics


def replicates(exact: dict[str, np.ndarray], groups: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    """Bootstrap replicates of every model's mean over seeds and problems: exact name -> (seeds, problems), groups (problems).

    Every replicate draws problems anew within each group (length), the same ones for all models, and each model's seeds anew. A model of
    one seed varies by its problems alone. Returns name -> (RESAMPLES).
    """
    rng = np.random.default_rng(seed)
    weight = np.zeros((RESAMPLES, len(groups)), dtype=np.float32)
    for g in np.unique(groups):
        here = np.flatnonzero(groups == g)
        weight[:, here] = rng.multinomial(len(here), np.full(len(here), 1 / len(here)), RESAMPLES) / len(groups)
    found = {}
    for name, x in exact.items():
        seeds = rng.multinomial(len(x), np.full(len(x), 1 / len(x)), RESAMPLES) / len(x)
        found[name] = (weight * (seeds @ x).astype(np.float32)).sum(1)
    return found


def interval(values: np.ndarray) -> list[float]:
    """The middle 95 %."""
    return [float(x) for x in np.quantile(values, (0.025, 0.975))]


def analyse(answers: dict[str, list[dict]]) -> dict:
    """name -> the answers of its seeds; one task. The table and the paired differences of Bifocal and every other, as NOTES.md planned."""
    def bits(name, lengths):
        return np.array([[float(x) for n in lengths for x in run["lengths"][str(n)]["exact"]] for run in answers[name]])

    cells = {f"{n}": (n,) for n in LENGTHS} | POOLS
    rows, differences = {name: {"seeds": len(runs), "window": runs[0]["window"], "bytes_per_layer": runs[0]["bytes_per_layer"], "cells": {}}
                         for name, runs in answers.items()}, {}
    reference = "bifocal" if "bifocal" in answers else next(name for name in answers if name.endswith("bifocal"))
    for cell, lengths in cells.items():
        exact = {name: bits(name, lengths) for name in answers}
        count = next(iter(exact.values())).shape[1] // len(lengths)
        drawn = replicates(exact, np.repeat(lengths, count))
        for name, x in exact.items():
            parts = [[r["lengths"][str(n)] for n in lengths] for r in answers[name]]
            bounds = [p["window_bound"] for p in parts[0]]
            rows[name]["cells"][cell] = {
                "exact": float(x.mean()), "interval": interval(drawn[name]), "right": int(x.sum()), "of": x.size,
                "seeds": [float(v) for v in x.mean(1)], "truncated": sum(p["truncated"] for seed in parts for p in seed),
                "window_bound": None if None in bounds else float(np.mean(bounds))}
            if name != reference:
                differences.setdefault(name, {})[cell] = {
                    "difference": float(exact[reference].mean() - x.mean()), "interval": interval(drawn[reference] - drawn[name])}
    return {"rows": rows, "reference": reference, "differences": differences}


def verdicts(analysis: dict) -> dict[str, bool]:
    """The predictions of the plan, each true or false."""
    rows, diff = analysis["rows"], analysis["differences"]

    def mean(name, cell):
        return rows[name]["cells"][cell]["exact"]

    found = {
        "short: swa_learned_sink is at most 5 points behind bifocal": diff["swa_learned_sink"]["short"]["interval"][1] <= 0.05,
        "long: bifocal is ahead of swa_learned_sink": diff["swa_learned_sink"]["long"]["interval"][0] > 0,
        "long: bifocal is ahead of swa_sink_tokens": diff["swa_sink_tokens"]["long"]["interval"][0] > 0,
        "bifocal_state collapses: less than half of swa_learned_sink on short answers":
            mean("bifocal_state", "short") < mean("swa_learned_sink", "short") / 2,
    }
    if "window_56" in rows:
        found["long: bifocal is ahead of its own window without a state"] = diff["window_56"]["long"]["interval"][0] > 0
    if "bifocal_strict" in rows:
        found["long: bifocal_strict, every byte counted, is ahead of swa_learned_sink"] = (
            mean("bifocal_strict", "long") > mean("swa_learned_sink", "long"))
    return found


# ----------------------------------------------------------------------------- causal checks


@contextlib.contextmanager
def changed(model: Decoder, what: str):
    """The model with one thing changed: 'state zeroed' (the far answer is 0), 'gate 0', 'gate 1' (all near, all far)."""
    undo = []
    for layer in model.layers:
        attention = layer.self_attn
        if what == "state zeroed":
            undo.append(attention.far.register_forward_hook(lambda module, args, out: (out[0] * 0, out[1])).remove)
            undo.append(functools.partial(setattr, attention, "fused", attention.fused))
            attention.fused = False  # one token at a time goes through the far part as well
        else:
            value, gate = float(what.split()[1]), attention.gate
            attention.gate = lambda q, k, v, gate=gate, value=value: torch.full_like(gate(q, k, v), value)
            undo.append(lambda attention=attention: delattr(attention, "gate"))
    try:
        yield model
    finally:
        for f in undo:
            f()


def causal_checks(folder: Path, count: int, device) -> dict[str, dict[str, float]]:
    """Exact match of a trained Bifocal student by length, whole and with one thing changed at a time."""
    model, source = load_run(folder, fast, device)
    half = Decoder(model.shape, model.row, model.window // 2, fast).to(device)
    load_weights(half, source)
    problems = {n: queue_problems(count, n) for n in (2, 8, 60)}

    def score(m):
        return {str(n): float(np.mean([o.exact for o in solve(m, p)[0]])) for n, p in problems.items()}

    found = {"whole": score(model), f"window cut to {half.window}": score(half.eval())}
    for what in ("state zeroed", "gate 0", "gate 1"):
        with changed(model, what):
            found[what] = score(model)
    return found


@torch.no_grad()
def gate_statistics(folder: Path, count: int, device) -> dict:
    """Means of the gate, of the forget gate and of the input gate of every layer, where a look-up is answered and elsewhere, while the
    model reads right answers of 60 steps; and the gates over one answer of 4 steps, (layers * heads, tokens), with its tokens."""
    model, _ = load_run(folder, fast, device)
    seen: dict[str, list] = {"gate": [], "forget": [], "input": []}
    undo = []
    for layer in model.layers:
        attention = layer.self_attn
        gate = attention.gate

        def record(q, k, v, gate=gate):
            seen["gate"].append(gate(q, k, v))
            return seen["gate"][-1]
        attention.gate = record
        undo.append(attention.far.forget_gate.register_forward_hook(lambda m, a, out: seen["forget"].append(torch.sigmoid(out))))
        undo.append(attention.far.input_gate.register_forward_hook(lambda m, a, out: seen["input"].append(15 * torch.tanh(out / 15))))
    rows, mask = queue_batch(queue_problems(count, 60))
    place = np.cumsum(mask, 1) - 1
    family = FAMILIES["queue"]
    look_up = torch.from_numpy((mask & (place % family.line == family.asked))[:, 1:])  # the query is the token before
    other = torch.from_numpy(mask[:, 1:]) & ~look_up
    model.hidden(torch.from_numpy(rows)[:, :-1].to(device))
    found = {name: [{"look_up": float(x.cpu()[look_up].mean()), "elsewhere": float(x.cpu()[other].mean())} for x in layers]
             for name, layers in seen.items()}
    for layers in seen.values():
        layers.clear()
    problem = queue_problems(1, 4)[0]
    encode = queue_tokenizer().encode
    ids = encode(problem.prompt) + encode(problem.answer)
    model.hidden(torch.tensor([ids], device=device))
    heat = torch.cat([x[0].T for x in seen["gate"]]).cpu()
    return found | {"heat": [[round(float(v), 3) for v in row] for row in heat], "prompt": len(encode(problem.prompt)),
                    "tokens": [queue_tokenizer().decode([i]).replace("\n", "").strip() for i in ids]}


# ----------------------------------------------------------------------------- reach


def reach(model: Decoder, count: int = 20, task: str = "queue", steps: int = 60) -> dict:
    """How far back an input still changes the output, while reading right answers of `steps` steps.

    gradient: at the last look-up of each problem, the norm of d log p(right token) / d embedding by distance, relative to the largest.
    swap: the greatest change of a log probability at that place when the token so far back is replaced by another symbol; exactly 0 means
    out of reach. Both (distances): the mean over problems. farthest: the largest distance at which the swap changes anything at all.
    """
    rows, mask = queue_batch(queue_problems(count, steps, family=task))
    family, device = FAMILIES[task], model.embed_tokens.weight.device
    distances = [d for d in range(1, FAMILIES[task].answer(steps) - 1) if d < 24 or d % 8 == 0]
    gradients, swaps = [], []
    symbols = [queue_tokenizer().encode(f" {s}")[0] for s in SYMBOLS]
    inputs = []

    def leaf(module, args, out):
        inputs.append(out.detach().requires_grad_())
        return inputs[-1]
    for row, answer_mask in tqdm(zip(rows, mask), total=len(rows), desc="reach", leave=False):
        place = np.cumsum(answer_mask) - 1
        asked = np.flatnonzero(answer_mask & (place % family.line == family.asked))
        t = int(asked[-1]) - 1  # the last look-up is asked of position t and stands at t + 1
        tokens = torch.from_numpy(row[: t + 1]).to(device)
        hook = model.embed_tokens.register_forward_hook(leaf)
        log_p = F.log_softmax(model.head(model.hidden(tokens[None])[0, -1]).float(), -1)
        hook.remove()
        norm = torch.autograd.grad(log_p[int(row[t + 1])], inputs.pop())[0][0].norm(dim=-1).cpu()
        swapped = tokens.repeat(-(-len(distances) // 16) * 16, 1)
        rng = np.random.default_rng(t)
        for j, d in enumerate(distances):
            if d <= t:
                swapped[j, t - d] = int(rng.choice([s for s in symbols if s != int(tokens[t - d])]))
        with torch.no_grad():
            before, *after = (F.log_softmax(model.head(model.hidden(part)[:, -1]).float(), -1)  # always 16 rows: equal to the bit
                              for part in (tokens.repeat(16, 1), *swapped.split(16)))
        there = np.array([d <= t for d in distances])
        change = torch.cat([x - before for x in after]).abs().amax(-1)[: len(distances)].cpu().numpy()
        gradients.append(np.where(there, [float(norm[t - d]) if d <= t else 0 for d in distances] / np.max(norm.numpy()), np.nan))
        swaps.append(np.where(there, change, np.nan))
    gradient, swap = np.nanmean(gradients, 0), np.nanmean(swaps, 0)
    touched = [d for d, s in zip(distances, swap) if s > 0]
    W = model.window
    return {"window": W, "layers": model.shape.layers, "stacked": None if W is None else model.shape.layers * (W - 1),
            "distances": distances, "gradient": [float(x) for x in gradient], "swap": [float(x) for x in swap],
            "farthest": max(touched, default=0)}


def report_reach(name: str, r: dict) -> None:
    """One model's reach in words and windows."""
    W = r["window"]
    print(f"{name}: window {W}" + (f", {r['layers']} layers: stacked they reach L (W-1) = {r['stacked']} tokens" if W else ""))
    marks = [("1 window", W), ("1.5 windows", int(1.5 * W)), ("L (W-1)", r["stacked"])] if W else []
    print(f"    {'distance':<22}{'windows':>8}{'gradient':>12}{'swap':>12}")
    for label, d in [("1", 1), ("8", 8), *marks, ("400", 400), ("592", 592)]:
        j = int(np.argmin([abs(x - d) for x in r["distances"]]))
        d = r["distances"][j]
        print(f"    {d:<5}{'' if label.isdigit() else f'({label})':<17}{f'{d / W:.2f}' if W else '-':>8}{r['gradient'][j]:>12.2e}"
              f"{r['swap'][j]:>12.2e}")
    print(f"    the farthest swap that changes anything: {r['farthest']} tokens back" + (f", {r['farthest'] / W:.2f} windows" if W else ""))


# ----------------------------------------------------------------------------- the whole evaluation


def evaluate(root: Path, quick: bool, device, count: int = PROBLEMS) -> dict:
    """Answer, check, measure and analyse; the result as one JSON object, kept in RESULT (quick: in `root`)."""
    folders = trained(root, quick)
    tasks = {}
    for name, paths in tqdm(folders.items(), desc="students", unit="student"):
        tasks.setdefault(STUDENTS[name].task, {})[name] = [answer(path, count, device) for path in paths]
    result = {"problems": count, "quick": quick, "tasks": {task: analyse(answers) for task, answers in tasks.items()}}
    result["verdicts"] = verdicts(result["tasks"]["queue"])
    if not quick:
        result["rates"] = choose_rates(root)
    config = read_json(folders["bifocal"][0] / "config.json")
    result["made"] = {key: config[key] for key in ("date", "machine", "commit", "versions", "recipe")}
    checks = [causal_checks(path, count // 4, device) for path in folders["bifocal"]]
    result["causal"] = {what: {n: float(np.mean([c[what][n] for c in checks])) for n in checks[0][what]} for what in checks[0]}
    result["gates"] = gate_statistics(folders["bifocal"][0], 20, device)
    result["reach"] = {name: reach(load_run(folders[name][0], fast, device)[0]) for name in ("swa_learned_sink", "bifocal")}
    write_json(root / "finding.json" if quick else RESULT, result)
    return result


def percent(value: float, ends: list[float], form: str) -> str:
    """A share and its interval in %, 24 wide."""
    return f"{100 * value:{form}} [{100 * ends[0]:{form}}, {100 * ends[1]:{form}}]".rjust(24)


def report(result: dict) -> None:
    """The tables."""
    for task, analysis in result["tasks"].items():
        rows, family = analysis["rows"], FAMILIES[task]
        print(f"\n{task}: exact match in %, {result['problems']} problems a length, [95 % interval over problems and seeds]")
        print(f"{'answer tokens':<26}{'seeds':>6}" + "".join(f"{family.answer(n):>8}" for n in LENGTHS)
              + f"{'short':>24}{'long':>24}{'long right':>12}{'cut off':>9}")
        for name, row in rows.items():
            c = row["cells"]
            pools = "".join(percent(c[p]["exact"], c[p]["interval"], ".1f") for p in POOLS)
            right = f"{c['long']['right']}/{c['long']['of']}"
            cut = sum(c[str(n)]["truncated"] for n in LENGTHS)
            print(f"{name:<26}{row['seeds']:>6}" + "".join(f"{100 * c[str(n)]['exact']:>8.1f}" for n in LENGTHS)
                  + pools + f"{right:>12}{cut:>9}")
            if row["window"]:
                print(f"{'  window bound, ' + str(row['window']):<32}" + "".join(f"{100 * c[str(n)]['window_bound']:>8.1f}" for n in LENGTHS)
                      + "".join(f"{100 * c[p]['window_bound']:>24.1f}" for p in POOLS))
        print(f"paired: {analysis['reference']} minus the other, points [95 % interval]")
        for name, cells in analysis["differences"].items():
            print(f"{name:<32}" + "".join(f"{100 * cells[str(n)]['difference']:>+8.1f}" for n in LENGTHS) + "".join(
                percent(cells[p]["difference"], cells[p]["interval"], "+.1f") for p in POOLS))
    print("\nthe plan's predictions")
    for text, holds in result["verdicts"].items():
        print(f"    {'held' if holds else 'NOT HELD':<10}{text}")
    print("\nbifocal with one thing changed, exact match in % at "
          + ", ".join(f"{FAMILIES['queue'].answer(int(n))} tokens" for n in result["causal"]["whole"]))
    for what, scores in result["causal"].items():
        print(f"    {what:<24}" + "".join(f"{100 * v:>8.1f}" for v in scores.values()))
    print("\nits gates by layer: where a look-up is answered / elsewhere")
    for name in ("gate", "forget", "input"):
        print(f"    {name:<8}" + "".join(f"{x['look_up']:>12.3f} / {x['elsewhere']:.3f}" for x in result["gates"][name]))
    print()
    for name, r in result["reach"].items():
        report_reach(name, r)


# ----------------------------------------------------------------------------- figures


def figures(result: dict, folder: Path = ASSETS) -> list[Path]:
    """The figures as PNG files, from the result alone. UserError: matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("the figures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 130, "savefig.bbox": "tight",
                         "axes.grid": True, "grid.color": "#eeeeee", "axes.axisbelow": True, "legend.frameon": False})
    folder.mkdir(parents=True, exist_ok=True)
    made = []

    def save(figure, name):
        made.append(folder / f"{name}.png")
        figure.savefig(made[-1], metadata={"Software": None})
        plt.close(figure)

    tokens = [FAMILIES["queue"].answer(n) for n in LENGTHS]
    rows = result["tasks"]["queue"]["rows"]
    figure, axis = plt.subplots(figsize=(7, 4))
    for name in [n for n in ("bifocal", "swa_learned_sink", "swa_sink_tokens", "bifocal_state", "window_56") if n in rows]:
        cells, colour = [rows[name]["cells"][str(n)] for n in LENGTHS], STUDENTS[name].colour
        axis.plot(tokens, [100 * c["exact"] for c in cells], "o-", color=colour, label=f"{name}: {STUDENTS[name].note}", markersize=4)
        axis.fill_between(tokens, *([100 * c["interval"][j] for c in cells] for j in (0, 1)), color=colour, alpha=0.15, linewidth=0)
    bound = [100 * rows["swa_learned_sink"]["cells"][str(n)]["window_bound"] for n in LENGTHS]
    axis.plot(tokens, bound, ":", color="#666666", label="the best a window of 72 could")
    axis.set(xscale="log", xticks=tokens, xlabel="tokens of the answer", ylabel="answers right, %", ylim=(-3, 103),
             title="answers right under 72 tokens of memory a layer")
    axis.set_xticks(tokens, [str(t) for t in tokens])
    axis.minorticks_off()
    axis.legend(fontsize=8, loc="lower left")
    save(figure, "finding_length")

    figure, axis = plt.subplots(figsize=(7, 3))
    for y, name in enumerate(reversed(FOUR)):
        row = memory_row(MINI, VARIANTS[name], BUDGET)
        state = row["tokens_exact"] - row["window"] - row["keep"]
        for left, width, colour, label in ((0, row["window"], "#9ecae1", "window"), (row["window"], row["keep"], "#e6ab02", "sink tokens"),
                                           (row["window"] + row["keep"], state, "#1b6ca8", "state, every byte")):
            axis.barh(y, width, left=left, color=colour, height=0.6, label=label if y == 0 else None)
    axis.axvline(BUDGET, color="#444444", linestyle="--", linewidth=1)
    axis.set_yticks(range(4), list(reversed(FOUR)))
    axis.set(xlabel="memory of a layer in tokens (1 token = 128 bytes); dashed: the budget", xlim=(0, 82))
    axis.legend(fontsize=8, ncol=3, loc="upper center", bbox_to_anchor=(0.5, 1.18))
    axis.grid(False)
    save(figure, "finding_memory")

    names = [name for name in VARIANTS if not name.endswith("_strict")]
    figure, axis = plt.subplots(figsize=(8, 0.32 * len(names) + 0.8))
    for y, name in enumerate(reversed(names)):
        for kind, a, b in sight(MINI, VARIANTS[name], BUDGET, 200):
            offset, colour = (0.17, "#d95f02") if kind == "exact" else (-0.17, "#9ecae1")
            axis.barh(y + offset, b - a, left=a - 200, height=0.3, color=colour)
    axis.set_yticks(range(len(names)), list(reversed(names)), fontsize=8)
    axis.set(xlabel="tokens before the query, of 200 read so far", xlim=(-200, 0),
             title="what a query sees: exact (orange) and in a summary (blue)")
    save(figure, "finding_sight")

    gates = result["gates"]
    figure, axis = plt.subplots(figsize=(11, 3.4))
    heat = np.array(gates["heat"])
    image = axis.imshow(heat, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axis.set_xticks(range(len(gates["tokens"])), gates["tokens"], fontsize=5)
    heads = len(heat) // MINI.layers
    axis.set_yticks([heads * l + (heads - 1) / 2 for l in range(MINI.layers)], [f"layer {l}" for l in range(MINI.layers)])
    for l in range(1, MINI.layers):
        axis.axhline(heads * l - 0.5, color="white", linewidth=2)
    axis.axvline(gates["prompt"] - 0.5, color="#d95f02", linewidth=1)
    axis.grid(False)
    axis.set_title("bifocal's gates over one problem, a row a head: white reads the window, blue the state; the answer begins at the line")
    figure.colorbar(image, fraction=0.02, pad=0.01)
    save(figure, "finding_gates")

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharex=True)
    for name, r in result["reach"].items():
        for axis, key in zip(axes, ("gradient", "swap")):
            y = np.array(r[key])
            axis.plot(r["distances"], np.where(y > 0, y, np.nan), color=STUDENTS[name].colour, label=f"{name}, W={r['window']}")
            axis.axvline(r["stacked"], color=STUDENTS[name].colour, linestyle=":", linewidth=1)
    for axis, title in zip(axes, ("gradient norm, relative", "greatest change of a log probability by a swap")):
        axis.set(yscale="log", xlabel="tokens back; dotted: L (W-1)", title=title)
    axes[0].legend(fontsize=8)
    save(figure, "finding_reach")

    if len(result["tasks"]) > 1:
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
        for axis, task in zip(axes, ("recent", "facts")):
            x = [FAMILIES[task].answer(n) for n in LENGTHS]
            for name, row in result["tasks"][task]["rows"].items():
                cells, colour = [row["cells"][str(n)] for n in LENGTHS], STUDENTS[name].colour
                axis.plot(x, [100 * c["exact"] for c in cells], "o-", color=colour, label=name.split("/")[1], markersize=4)
                axis.fill_between(x, *([100 * c["interval"][j] for c in cells] for j in (0, 1)), color=colour, alpha=0.15, linewidth=0)
            axis.set(xscale="log", xlabel="tokens of the answer", ylim=(-3, 103), title={
                "recent": "recent: only the last 16 tokens matter", "facts": "facts: more pairs than a state can hold"}[task])
            axis.set_xticks(x, [str(t) for t in x])
            axis.minorticks_off()
        axes[0].set_ylabel("answers right, %")
        axes[0].legend(fontsize=8, loc="lower left")
        save(figure, "finding_controls")
    return made


def main() -> None:
    """Tables and figures again from the committed result."""
    parser = Parser(description=main.__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=RESULT, help="a result of eval.py finding (default: the committed one)")
    parser.add_argument("--figures", type=Path, default=None, metavar="DIR", help="where to draw (default: beside the file)")
    args = parser.parse_args()
    result = read_json(args.file)
    if "tasks" not in result:
        raise UserError(f"{args.file}: not a result of eval.py finding")
    report(result)
    made = figures(result, args.figures or args.file.parent)
    print(json.dumps({"figures": [str(p) for p in made], "verdicts": result["verdicts"]}))


if __name__ == "__main__":
    cli(main)
