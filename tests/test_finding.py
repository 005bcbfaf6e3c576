"""The experiment: its statistics, its plan, its checks on students, its figures."""

import json

import numpy as np
import pytest
import torch

import finding
import reference
import train
from reference import MINI, build, sight
from tasks import FAMILIES, LENGTHS, queue_problems, reading_accuracy, window_bound
from weights import describe, save_weights, write_json


def answers(rate, seeds=1, window=72, count=20, seed=0):
    """What `finding.answer` gives of models that are right with probability `rate`."""
    rng = np.random.default_rng(seed)
    return [{"window": window, "bytes_per_layer": 9216, "parameters": 1, "lengths": {
        str(n): {"exact": "".join("1" if rng.random() < rate(n) else "0" for _ in range(count)), "truncated": 0, "window_bound": 0.5}
        for n in LENGTHS}} for _ in range(seeds)]


# ----------------------------------------------------------------------------- statistics


def test_a_model_against_itself_differs_by_nothing():
    one = answers(lambda n: 0.5)
    analysis = finding.analyse({"bifocal": one, "other": one})
    for cell in analysis["differences"]["other"].values():
        assert cell["difference"] == 0 and cell["interval"] == [0, 0]


def test_seeds_widen_the_interval():
    """Two seeds of 0 and 1 say less than four times the problems of seeds that agree."""
    zero, one = np.zeros((1, 200)), np.ones((1, 200))
    groups = np.repeat([2, 4], 100)
    apart = finding.interval(finding.replicates({"x": np.concatenate([zero, one])}, groups)["x"])
    assert apart == pytest.approx([0, 1])
    half = np.tile([0.0, 1.0], 100)[None]
    low, high = finding.interval(finding.replicates({"x": np.concatenate([half, half])}, groups)["x"])
    assert low == pytest.approx(0.5 - 1.96 * 0.5 / 200**0.5, abs=0.01) and high == pytest.approx(1 - low, abs=0.01)


def test_lengths_are_drawn_apart():
    """A pool of two lengths, one always right, one never: every replicate is one half."""
    x = np.concatenate([np.ones((1, 50)), np.zeros((1, 50))], 1)
    assert np.allclose(finding.replicates({"x": x}, np.repeat([2, 4], 50))["x"], 0.5)


def test_the_analysis_counts():
    runs = {"bifocal": answers(lambda n: 1.0, 3, 56), "swa_learned_sink": answers(lambda n: float(n < 8), 3),
            "swa_sink_tokens": answers(lambda n: float(n < 8), 3, 68), "bifocal_state": answers(lambda n: 0.0, 3, 8)}
    analysis = finding.analyse(runs)
    long = analysis["rows"]["bifocal"]["cells"]["long"]
    assert (long["right"], long["of"], long["exact"], long["seeds"]) == (120, 120, 1.0, [1.0] * 3)
    assert analysis["differences"]["swa_learned_sink"]["long"] == {"difference": 1.0, "interval": [1.0, 1.0]}
    assert all(finding.verdicts(analysis).values())
    runs["swa_learned_sink"] = answers(lambda n: 1.0, 3)
    held = finding.verdicts(finding.analyse(runs))
    assert not held["long: bifocal is ahead of swa_learned_sink"] and held["short: swa_learned_sink is at most 5 points behind bifocal"]


# ----------------------------------------------------------------------------- the plan


def test_stages(tmp_path):
    """Every tuned student gets the same trials; the students take the best rates, the twins their row's."""
    plan = finding.stages(tmp_path, quick=False)
    title, trials = next(plan)
    tuned = [name for name, s in finding.STUDENTS.items() if s.rates_of is None]
    assert title == "trials" and len(trials) == len(tuned) * len(finding.GRID)
    for name in tuned:
        for scale in finding.GRID:
            write_json(tmp_path / finding.trial(name, scale) / "metrics.json",
                       {"lengths": {"2": {"exact": scale if name == "bifocal" else 0.5}}, "look_up": 1.0 if scale == 0.5 else 0.0, "copy": 0.0})
    title, students = next(plan)
    assert len(students) == sum(s.seeds for s in finding.STUDENTS.values())

    def rate(name):
        flags = students[f"{name}/seed0"]
        return float(flags[flags.index("--lr") + 1])
    assert rate("bifocal") == rate("bifocal_strict") == rate("facts/bifocal") == 2e-3 and rate("swa") == 5e-4
    parser = [flags for runs in (trials, students) for flags in runs.values()]
    assert all("--budget" in flags for flags in parser)
    assert list(next(finding.stages(tmp_path, quick=True))[1]) == [f"{name}/seed0" for name in finding.FOUR]


def test_flags_are_refused(monkeypatch, tmp_path):
    for flags, word in ((["--suite", "finding", "--lr", "1"], "--lr"), (["--quick"], "--suite")):
        monkeypatch.setattr("sys.argv", ["train.py", *flags, "--out", str(tmp_path)])
        with pytest.raises(reference.UserError, match=word):
            train.main()
    with pytest.raises(reference.UserError, match="not trained yet"):
        finding.trained(tmp_path, True)


# ----------------------------------------------------------------------------- students


@pytest.fixture
def folder(tmp_path):
    """A run folder of an untrained Bifocal student with gates that are neither open nor shut."""
    torch.manual_seed(0)
    model = build(MINI, "bifocal", 72)
    save_weights(tmp_path / "run" / "student.safetensors", model)
    write_json(tmp_path / "run" / "config.json", {"task": "queue", **describe(model)})
    return tmp_path / "run"


@torch.no_grad()
def test_changed(folder):
    """Gates at 0 are the window alone, a zeroed state leaves its share of it, and all is as before afterwards."""
    model, _ = finding.load_run(folder)
    tokens = torch.arange(90)[None] % 300
    before = model(tokens)
    near = build(MINI, reference.combine("bifocal", far="none"), window=56)
    near.load_state_dict(model.state_dict(), strict=False)
    with finding.changed(model, "gate 0"):
        assert torch.allclose(model(tokens), near(tokens), atol=1e-5)
    with finding.changed(model, "state zeroed"):
        zeroed, cache = model(tokens), model.cache(1, dtype=torch.float32)
        steps = torch.cat([model(tokens[:, t : t + 1], cache=cache) for t in range(90)], 1)
    assert torch.allclose(steps, zeroed, atol=1e-4)  # while decoding too
    for layer in near.layers:  # the gate of a fresh student is 1/2 everywhere
        layer.self_attn.o_proj.weight *= 0.5
    assert torch.allclose(zeroed, near(tokens), atol=1e-5) and torch.equal(model(tokens), before)


def test_gate_statistics(folder):
    found = finding.gate_statistics(folder, 2, "cpu")
    assert all(x["look_up"] == x["elsewhere"] == 0.5 for x in found["gate"]) and len(found["gate"]) == MINI.layers
    assert len(found["heat"]) == MINI.layers * MINI.heads and len(found["heat"][0]) == len(found["tokens"])


@pytest.mark.parametrize("variant", ["swa", "bifocal"])
def test_reach(variant):
    """A stack of windows reaches L (W - 1) tokens back and not one more; a state all the way."""
    torch.manual_seed(0)
    r = finding.reach(build(MINI, variant, window=9).eval(), 1, steps=6)
    assert r["stacked"] == 24
    changed = [d for d, s in zip(r["distances"], r["swap"]) if s > 0]
    assert r["farthest"] == max(changed) == (24 if variant == "swa" else 56)
    assert all((g > 0) == (d <= 24 or variant == "bifocal") for d, g in zip(r["distances"], r["gradient"]) if d > 8)


# ----------------------------------------------------------------------------- tasks


@pytest.mark.parametrize("family", ["recent", "facts"])
def test_a_reader_can_solve_them(family):
    """What the answer says follows from the prompt; a window of the bound sees what the bound counts."""
    kind = FAMILIES[family]
    for n in (1, 7, 60):
        problem = queue_problems(1, n, family=family)[0]
        lines = problem.answer.split("\n")[1:]
        assert len(lines) == n + 1 and lines[-1] == "done" and [int(x.split()[0]) for x in lines[:-1]] == list(range(n, 0, -1))
        tokens = len(finding.queue_tokenizer().encode(problem.answer))
        assert tokens == kind.answer(n) and abs(len(finding.queue_tokenizer().encode(problem.prompt)) - kind.prompt(n)) <= 1
        if family == "facts":
            pairs = dict(line.split() for line in problem.prompt.split("\n")[1:-2])
            assert all(pairs[x] == y for x, y in (line.split() for line in lines[:-1]))
            assert window_bound(problem, 1000) == 1 and (n < 60 or window_bound(problem, 72) < 1e-20)
        else:
            assert window_bound(problem, 16) == 1


def test_facts_bound_by_hand():
    """Three pairs and a window of 8: the first answer sees pair 2 and 3 whole, the later ones fewer."""
    problem = finding.FAMILIES["facts"].draw(np.random.default_rng(0), 3)
    tokens = finding.queue_tokenizer().encode(problem.prompt + problem.answer)
    chance, keys = 1.0, [x for x, _ in problem.table]
    for j, x in enumerate(problem.popped):
        now = len(finding.queue_tokenizer().encode(problem.prompt)) + 2 * j  # the key of the answer's line, where its letter is due
        place = 1 + 2 * keys.index(x)
        assert tokens[place] == tokens[now]
        chance /= 1 if place > now - 8 else 16
    assert window_bound(problem, 8) == pytest.approx(chance)


def test_reading_accuracy_of_a_control():
    model = build(MINI, "swa", 72)
    found = reading_accuracy(model, queue_problems(2, 4, family="facts"))
    assert set(found) == {"look_up", "copy"} and all(0 <= x <= 1 for x in found.values())


# ----------------------------------------------------------------------------- figures


def test_sight():
    def row(name):
        return reference.VARIANTS[name]
    assert sight(MINI, row("full"), 72, 200) == [("exact", 0, 200)]
    assert sight(MINI, row("swa_sink_tokens"), 72, 200) == [("exact", 132, 200), ("exact", 0, 4)]
    assert sight(MINI, row("bifocal"), 72, 200) == [("exact", 144, 200), ("summary", 0, 200)]
    assert sight(MINI, row("lolcats"), 72, 200) == [("exact", 192, 200), ("summary", 0, 192)]
    assert sight(MINI, row("mlstm"), 72, 20) == [("summary", 0, 20)]


def test_tables_and_figures_from_the_result_alone(tmp_path, monkeypatch, capsys):
    runs = {name: answers(lambda n: 0.7, 1 if name == "swa" else 2) for name in (*finding.FOUR, "swa")}
    tasks = {"queue": runs} | {task: {f"{task}/{name}": answers(lambda n: 0.3) for name in ("swa_learned_sink", "bifocal")}
                               for task in ("recent", "facts")}
    reach = {"window": 56, "layers": 3, "stacked": 165, "distances": [1, 8, 56, 168], "gradient": [1, 0.1, 0.1, 0], "swap": [1, 0.1, 0.1, 0],
             "farthest": 56}
    result = {"problems": 20, "quick": False, "tasks": {task: finding.analyse(a) for task, a in tasks.items()},
              "causal": {"whole": {"2": 1.0, "8": 0.5, "60": 0.1}}, "reach": {"bifocal": reach, "swa_learned_sink": reach},
              "gates": {name: [{"look_up": 0.5, "elsewhere": 0.25}] * 3 for name in ("gate", "forget", "input")}
              | {"heat": [[0.5] * 5] * 24, "prompt": 2, "tokens": list("abcde")}}
    result["verdicts"] = finding.verdicts(result["tasks"]["queue"])
    write_json(tmp_path / "finding.json", result)
    monkeypatch.setattr("sys.argv", ["finding.py", str(tmp_path / "finding.json")])
    finding.main()
    out = capsys.readouterr().out
    made = json.loads(out.splitlines()[-1])["figures"]
    assert len(made) == 6 and all((tmp_path / name.split("/")[-1]).stat().st_size > 5_000 for name in made)
    for words in ("window bound", "NOT HELD" if not all(result["verdicts"].values()) else "held", "0.500 / 0.250", "facts"):
        assert words in out
