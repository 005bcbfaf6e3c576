"""eval.py: how good a model with a fixed memory is.

    python eval.py answers runs/bifocal runs/swa_learned_sink       # exact match by answer length, paired
    python eval.py text --teacher smollm2 --variant swa_sink_tokens --window 508 --sinks 4 --text FILE
    python eval.py text runs/bifocal-smollm2 --text FILE            # mean next-token loss by position
    python eval.py finding                                          # the experiment, after train.py --suite finding
    python eval.py reach runs/bifocal runs/swa_learned_sink         # how far back an input still changes the output

Tables for people; the last line is the same as one JSON object.
"""

from __future__ import annotations

import json
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import fast
import finding
from reference import VARIANTS, Parser, UserError, build, cli, combine, pick_device, use_cores
from tasks import FAMILIES, LENGTHS, open_teacher, queue_problems, read_text, solve, window_bound
from weights import load_run, load_weights

RESAMPLES = 10_000


# ----------------------------------------------------------------------------- statistics


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95 % Wilson score interval of a share: n = 1 gives a wide one, never [1, 1]. Raises on n = 0."""
    z, p = 1.959964, right / n
    centre, half = p + z * z / (2 * n), z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return tuple(float(np.clip((centre + s * half) / (1 + z * z / n), 0, 1)) for s in (-1, 1))


def paired_bootstrap(a: np.ndarray, b: np.ndarray, seed: int = 0) -> tuple[float, float] | None:
    """95 % interval of mean(a - b) over problems drawn with the same indices for both, (n) each.

    A model against itself gives exactly (0, 0). One problem gives None: it says nothing about others.
    """
    d = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
    if len(d) < 2:
        return None
    means = np.random.default_rng(seed).choice(d, (RESAMPLES, len(d))).mean(1)
    return tuple(float(x) for x in np.quantile(means, (0.025, 0.975)))


# ----------------------------------------------------------------------------- answers


def answers(args) -> dict:
    """Exact match by answer length of every run on the same problems, and paired differences."""
    lengths = list(dict.fromkeys(positive("--lengths", n) for n in args.lengths.split(","))) if args.lengths else list(LENGTHS)
    positive("--problems", args.problems)
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: must be at least 0")
    runs, outcomes, task, problems = [], {}, None, {}
    for folder in args.runs:
        model, source = load_run(folder, fast, args.device)
        if source.config.get("task") not in FAMILIES:
            raise UserError(f"{folder}: trained on text, not on the queue machine: use eval.py text {folder} --text FILE")
        task = task or source.config["task"]
        if source.config["task"] != task:
            raise UserError(f"{folder}: trained on {source.config['task']}, {args.runs[0]} on {task}: compare runs of one task")
        if args.symbols and task != "queue":
            raise UserError(f"--symbols {args.symbols} belongs to the queue machine; {folder} was trained on {task}")
        problems = problems or {n: queue_problems(args.problems, n, args.seed, args.symbols, task) for n in lengths}
        name = Path(folder).name if len({Path(r).name for r in args.runs}) == len(args.runs) else folder
        row = {"run": name, "variant": model.row.name, "window": model.window, "lengths": {}}
        for n in tqdm(lengths, desc=name, unit="length", leave=False):
            solved, row["bytes_per_layer"] = solve(model, problems[n])
            outcomes[name, n] = np.array([o.exact for o in solved])
            row["lengths"][n] = {
                "n": len(solved), "exact": float(outcomes[name, n].mean()), "interval": wilson(int(outcomes[name, n].sum()), len(solved)),
                "truncated": sum(o.truncated for o in solved),
                "window_bound": None if model.window is None else float(np.mean([window_bound(p, model.window) for p in problems[n]]))}
        runs.append(row)
    differences = [
        {"a": a["run"], "b": b["run"], "lengths": {
            n: {"difference": a["lengths"][n]["exact"] - b["lengths"][n]["exact"],
                "interval": paired_bootstrap(outcomes[a["run"], n], outcomes[b["run"], n])} for n in lengths}}
        for a, b in combinations(runs, 2)]

    print(f"exact match in %, {args.problems} problems a length, greedy, [95 % interval]; + answers cut off\n")
    print(f"{'answer tokens':<22}" + "".join(f"{FAMILIES[task].answer(n):>22}" for n in lengths) + f"{'B/layer':>10}")
    for row in runs:
        cells = [f"{100 * r['exact']:.1f} [{100 * r['interval'][0]:.0f}, {100 * r['interval'][1]:.0f}]"
                 + (f" +{r['truncated']}" if r["truncated"] else "") for r in row["lengths"].values()]
        print(f"{row['run']:<22}" + "".join(f"{c:>22}" for c in cells) + f"{row['bytes_per_layer']:>10,}")
        if row["window"] is not None:
            print(f"{'  its window bound':<22}" + "".join(f"{100 * r['window_bound']:>22.1f}" for r in row["lengths"].values()))
    if differences:
        print("\npaired differences in points, [95 % bootstrap interval over problems]")
    for d in differences:
        cells = [f"{100 * r['difference']:+.1f} " + ("[one problem]" if r["interval"] is None else
                 f"[{100 * r['interval'][0]:+.1f}, {100 * r['interval'][1]:+.1f}]") for r in d["lengths"].values()]
        print(f"{d['a']} - {d['b']}\n{'':<22}" + "".join(f"{c:>22}" for c in cells))
    return {"task": task, "problems": args.problems, "seed": args.seed, "runs": runs, "differences": differences}


# ----------------------------------------------------------------------------- text


@torch.no_grad()
def token_losses(model, tokens: torch.Tensor, chunk: int = 512) -> torch.Tensor:
    """Loss of every next token, (T-1), for tokens (T): entry t is -log p(token t+1 | tokens 0..t)."""
    x = model.hidden(tokens[None])[0, :-1]
    return torch.cat([F.cross_entropy(model.head(x[a : a + chunk]).float(), tokens[1:][a : a + chunk], reduction="none")
                      for a in range(0, len(x), chunk)])


def text(args) -> dict:
    """Mean next-token loss of a text by position range."""
    if args.start < 0 or args.length < 2:
        raise UserError(f"--start {args.start} --length {args.length}: start at 0 or later and read at least 2 tokens")
    content = read_text(args.text)
    splitter = args.splitter or ("smollm" if args.run else "gpt2")
    ranges = [parse_range(r) for r in args.ranges.split(",")]
    if args.run:
        model, source = load_run(args.run, fast, args.device)
        if source.config.get("task") != "text":
            raise UserError(f"{args.run}: trained on the queue machine or its like, not on text: use eval.py answers {args.run}")
        teacher = source.config["teacher"]
        tokenizer = open_teacher(teacher, splitter)[1]
        name = Path(args.run).name
    else:
        teacher = args.teacher
        source, tokenizer = open_teacher(teacher, splitter)
        settings = args.row + ([] if args.sinks is None else [f"keep={args.sinks}"])
        row = combine(args.variant, settings=settings)
        model = build(source.model_shape, row, args.budget, args.window, fast).to(args.device)
        load_weights(model, source)
        name = f"{row.name} ({Path(args.teacher).name}, not trained)"
    ids = tokenizer.encode(content)
    if args.start + 2 > len(ids):
        raise UserError(f"{args.text} has {len(ids)} tokens: --start {args.start} leaves nothing to read: use a smaller --start")
    tokens = torch.tensor(ids[args.start : args.start + args.length], device=args.device)
    if len(tokens) < args.length:
        print(f"note: {args.text} has {len(ids)} tokens: read {len(tokens)}, not {args.length}")
    if model.window is not None and model.window >= len(tokens):
        print(f"note: the window of {model.window} covers all {len(tokens)} tokens: the result is that of full attention")
    losses = token_losses(model, tokens)
    result = {}
    print(f"{name}: window {'all' if model.window is None else model.window}, sinks {model.row.keep}; "
          f"tokens {args.start} to {args.start + len(tokens) - 1} of {args.text}")
    if teacher == "smollm2":
        print(f"splitter {splitter}: " + ("that of NOTES.md's table; the model's own is --splitter smollm"
                                               if splitter == "gpt2" else "the model's own"))
    print(f"{'positions':<16}{'tokens':>8}{'mean loss':>12}")
    for label, a, b in ranges:
        part = losses[a:b]
        result[label] = part.mean().item() if len(part) else None  # a range past the text's end
        print(f"{label:<16}{len(part):>8}" + (f"{result[label]:>12.4f}" if len(part) else f"{'-':>12}"))
    return {"name": name, "variant": model.row.name, "window": model.window, "keep": model.row.keep,
            "start": args.start, "length": len(tokens), "splitter": splitter if teacher == "smollm2" else None,
            "loss": result}


def find(args) -> dict:
    """The experiment's evaluation."""
    positive("--problems", args.problems)
    root = args.runs or Path("runs/finding-quick" if args.quick else "runs/finding")
    result = finding.evaluate(root, args.quick, args.device, args.problems)
    finding.report(result)
    made = finding.figures(result, root if args.quick else finding.ASSETS)
    return {"figures": [str(p) for p in made], "verdicts": result["verdicts"]}


def reach(args) -> dict:
    """The reach of trained students."""
    positive("--problems", args.problems)
    found = {}
    for folder in args.runs:
        model, source = load_run(folder, fast, args.device)
        if source.config.get("task") not in FAMILIES:
            raise UserError(f"{folder}: trained on text: reach is measured on the miniature's problems")
        found[str(folder)] = finding.reach(model, args.problems, source.config["task"])
        finding.report_reach(str(folder), found[str(folder)])
    return found


def parse_range(label: str) -> tuple[str, int, int]:
    """'512:' or '0:512' -> (label, first, past the last). Raises UserError."""
    a, colon, b = label.partition(":")
    try:
        first, last = int(a or 0), int(b) if b else sys.maxsize
    except ValueError:
        first = last = -1
    if not colon or not 0 <= first < last:
        raise UserError(f"--ranges {label}: write FIRST:LAST, such as 512: or 0:512,512:1024")
    return label, first, last


def positive(flag: str, value) -> int:
    """value as a whole number >= 1. Raises UserError naming the flag."""
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise UserError(f"{flag} {value}: a whole number of at least 1")
    return number


def main() -> None:
    """The command line."""
    parser = Parser(description="How good a model with a fixed memory is.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    a = commands.add_parser("answers", help="exact match of the queue machine by answer length")
    a.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    a.add_argument("--problems", type=int, default=200, help="problems of each length")
    a.add_argument("--lengths", help="steps, such as 2,4,60 (an answer has 10 n + 1 tokens)")
    a.add_argument("--symbols", type=int, help="K; default: 2 to 16 at random")
    a.add_argument("--seed", type=int, default=0, help="seed of the problems")
    t = commands.add_parser("text", help="mean next-token loss of a text by position")
    t.add_argument("run", nargs="?", metavar="RUN", help="a run folder trained on text; or --teacher and --variant")
    t.add_argument("--text", required=True, metavar="FILE")
    t.add_argument("--teacher", default="smollm2", help="smollm2 or a Hugging Face folder")
    t.add_argument("--variant", default="full", choices=VARIANTS, metavar="NAME", help=" ".join(VARIANTS))
    t.add_argument("--budget", type=int, help="tokens of memory a layer")
    t.add_argument("--window", type=int, help="W, instead of a budget")
    t.add_argument("--sinks", type=int, help="kept sink tokens N, instead of the variant's")
    t.add_argument("--row", action="append", default=[], metavar="FIELD=VALUE", help="change a field of the variant's row")
    t.add_argument("--start", type=int, default=0, help="first token to read")
    t.add_argument("--length", type=int, default=2048, help="tokens to read")
    t.add_argument("--splitter", choices=("gpt2", "smollm"),
                   help="how smollm2's text is cut before merging (default: smollm for a RUN, else gpt2); NOTES.md, 'Two splitters'")
    t.add_argument("--ranges", default="0:512,512:", help="position ranges, FIRST:LAST with commas")
    f = commands.add_parser("finding", help="the experiment of finding.py: answers, causal checks, reach, analysis, figures")
    f.add_argument("--quick", action="store_true", help="of train.py --suite finding --quick; nothing is written but in its folder")
    f.add_argument("--runs", type=Path, help="the suite's folder (default runs/finding, or runs/finding-quick)")
    f.add_argument("--problems", type=int, default=finding.PROBLEMS, help="problems of each length")
    r = commands.add_parser("reach", help="how far back an input still changes the output, by gradient and by swaps")
    r.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    r.add_argument("--problems", type=int, default=20)
    for p in (a, t, f, r):
        p.add_argument("--device", default="cpu", choices=("auto", "cpu", "cuda"))
    args = parser.parse_args()
    args.device = pick_device(args.device)
    use_cores()
    print(json.dumps({"answers": answers, "text": text, "finding": find, "reach": reach}[args.command](args)))


if __name__ == "__main__":
    cli(main)
