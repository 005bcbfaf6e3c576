"""Training: objectives, recipes, reproducibility, checkpoints, and a user's mistakes."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from reference import MINI, VARIANTS, UserError, build, cli, combine, is_new
from train import queue_step, rate_share, stage1_loss

ROOT = Path(__file__).parents[1]
TINY = ["--batch", "1", "--steps", "4", "--stage1-steps", "2", "--problems", "1", "--checkpoint-every", "2"]


def command(*args):
    return [sys.executable, str(ROOT / "train.py"), *map(str, args)]


def run(*args, **kwargs):
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=300, **kwargs)


def losses(folder):
    return [(e["step"], e["stage"], e["loss"], e["lr"]) for e in map(json.loads, (folder / "log.jsonl").read_text().splitlines())]


def wait_for_lines(process, folder, lines):
    """Until the log has that many lines."""
    for _ in range(6000):
        if (folder / "log.jsonl").exists() and (folder / "log.jsonl").read_text().count("\n") >= lines:
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    raise AssertionError("the run does not get on")


# ----------------------------------------------------------------------------- objectives


def test_stage1_is_zero_for_the_teacher_itself_and_trains_new_parameters_alone():
    torch.manual_seed(0)
    teacher, student = build(MINI, "full"), build(MINI, "swa_learned_sink", window=700)
    student.load_state_dict(teacher.state_dict(), strict=False)
    with torch.no_grad():
        for layer in student.layers:
            layer.self_attn.sink.fill_(-float("inf"))
    tokens = torch.randint(0, MINI.vocab, (2, 30))
    assert stage1_loss(student, teacher, tokens, None).item() < 1e-10
    student = build(MINI, "bifocal")
    student.load_state_dict(teacher.state_dict(), strict=False)
    assert stage1_loss(student, teacher, tokens, None).item() > 1e-3


def test_batches_are_a_function_of_seed_and_step():
    recipe = train.RECIPES["mini"]
    a, b = queue_step(0, 7, recipe, False), queue_step(0, 7, recipe, False)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    assert not torch.equal(a[0], queue_step(0, 8, recipe, False)[0]) and not torch.equal(a[0], queue_step(1, 7, recipe, False)[0])


def test_rates():
    shares = [rate_share(s, 100) for s in range(100)]
    assert shares[0] == pytest.approx(0.2) and max(shares) == 1 and shares[40] == 1 and 0 < shares[-1] < 0.02
    assert rate_share(0, 1) > 0


# ----------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A whole tiny run, never interrupted."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    done = run("--variant", "bifocal", *TINY, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done


def test_whole_run(whole):
    out, done = whole
    assert sorted(p.name for p in out.iterdir() if p.name != ".lock") == ["config.json", "log.jsonl", "metrics.json", "student.safetensors"]
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["out"] == str(out) and set(last["lengths"]) == {"2", "4", "8", "16", "32", "60"}
    assert last["bytes_per_layer"] == 9352  # 56 tokens of 128 B and two states of (256 + 16 + 1) float32
    for words in ("exact match", "window bound", "9,352", "73.06", "eval.py answers"):
        assert words in done.stdout
    config = json.loads((out / "config.json").read_text())
    assert config["window"] == 56 and config["seed"] == 0 and config["recipe"]["steps"] == 4 and config["versions"]["torch"]
    stages = [stage for _, stage, _, _ in losses(out)]
    assert stages == ["I"] * 2 + ["II"] * 4


def test_same_seed_same_curve(whole, tmp_path):
    done = run("--variant", "bifocal", *TINY, "--out", tmp_path / "again")
    assert done.returncode == 0 and losses(tmp_path / "again") == losses(whole[0])
    a, b = (p / "student.safetensors" for p in (tmp_path / "again", whole[0]))
    assert a.read_bytes() == b.read_bytes()


def test_killed_and_resumed(whole, tmp_path):
    """SIGKILL at three moments; a checkpoint that was being written at that moment changes nothing."""
    out = tmp_path / "killed"
    args = ["--variant", "bifocal", *TINY, "--out", out]
    for lines in (1, 3, 5):
        process = subprocess.Popen(command(*args, "--resume"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        wait_for_lines(process, out, lines)
        process.kill()
        process.wait()
        (out / "checkpoint").mkdir(exist_ok=True)
        (out / "checkpoint" / ".state.pt.tmp").write_bytes(b"half a checkpoint")
    done = run(*args, "--resume")
    assert done.returncode == 0, done.stderr
    assert losses(out) == losses(whole[0])
    assert (out / "student.safetensors").read_bytes() == (whole[0] / "student.safetensors").read_bytes()


def test_interrupted(whole, tmp_path):
    out = tmp_path / "interrupted"
    args = ["--variant", "bifocal", *TINY, "--out", out]
    process = subprocess.Popen(command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_lines(process, out, 1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume" in stdout and "Traceback" not in stderr
    assert (out / "checkpoint" / "state.pt").exists()
    without = run(*args)
    assert without.returncode == 2 and "--resume" in without.stderr
    assert run(*args, "--resume").returncode == 0
    assert losses(out) == losses(whole[0])


def test_second_run_in_the_same_folder(whole):
    out, _ = whole
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    again = run("--variant", "bifocal", *TINY, "--out", out)
    assert again.returncode == 0 and "finished already" in again.stdout
    for args, words in ((["--seed", "1"], "another seed (0, not 1)"), (["--lr", "0.5"], "another recipe lr"),
                        (["--window", "9"], "another window")):
        other = run("--variant", "bifocal", *TINY, "--out", out, *args)
        assert other.returncode == 2 and words in other.stderr and other.stderr.count("\n") == 1
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_disk_full(tmp_path):
    """No file may grow past 1 MB: the checkpoint cannot be written, the error says so, no half file stays."""
    out = tmp_path / "full"
    done = run("--variant", "bifocal", *TINY, "--out", out,
               preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)))
    assert done.returncode == 2, done.stderr
    assert "cannot be written" in done.stderr and "Traceback" not in done.stderr
    assert not list((out / "checkpoint").iterdir())


def test_broken_checkpoint(tmp_path, whole):
    out = tmp_path / "broken"
    (out / "checkpoint").mkdir(parents=True)
    (out / "config.json").write_text((whole[0] / "config.json").read_text())
    (out / "checkpoint" / "state.pt").write_bytes(b"not a checkpoint")
    done = run("--variant", "bifocal", *TINY, "--out", out, "--resume")
    assert done.returncode == 2 and "state.pt" in done.stderr and "Traceback" not in done.stderr


def test_non_finite_steps_are_not_applied(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--variant", "bifocal", *TINY, "--steps", "20", "--out", str(tmp_path / "nan")])
    true_loss, weights = train.Run.loss, []

    def loss(self, step, stage):
        value, tokens = true_loss(self, step, stage)
        weights.append(self.student.layers[0].mlp.up_proj.weight.detach().clone())
        return (value * float("nan") if step in (4,) or step >= 8 else value), tokens

    monkeypatch.setattr(train.Run, "loss", loss)
    with pytest.raises(UserError, match="not finite 5 times in a row at step 12"):
        train.main()
    assert torch.equal(weights[4], weights[5]) and not torch.equal(weights[5], weights[6])
    assert torch.load(tmp_path / "nan" / "checkpoint" / "state.pt")["step"] == 8


# ----------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("args, words", [
    (["--variant", "bifcal"], ["bifcal", "bifocal"]),
    (["--teacher", "no/such/folder"], ["no/such/folder"]),
    (["--budget", "10"], ["--budget 10", "bifocal", "17"]),
    (["--budget", "0"], ["--budget"]),
    (["--window", "-3"], ["--window -3"]),
    (["--steps", "0"], ["--steps"]),
    (["--steps", "many"], ["--steps", "many"]),
    (["--variant", "full", "--window", "5"], ["--window 5", "full"]),
    (["--data", "x.txt"], ["--data", "--teacher smollm2"]),
    (["--row", "feature=l2"], ["--row feature=l2"]),
    (["--row", "features=cosine"], ["cosine", "softmax"]),
    (["--device", "tpu"], ["tpu"]),
    (["--variant", "full", "--teacher", "none", "--budget", "7"], ["--budget"]),
    (["--variant", "bifocal", "--teacher", "none"], ["--teacher none", "full"]),
    (["--lr", "nan"], ["--lr nan"]),
    (["--gate-bias", "inf"], ["--gate-bias inf"]),
    (["--ce", "5"], ["--ce 5", "0 to 1"]),
    (["--seed", str(2**70)], ["--seed", "2^63"]),
])
def test_mistakes(args, words, tmp_path, monkeypatch, capsys):
    out = tmp_path / "never"
    monkeypatch.setattr(sys, "argv", ["train.py", *args, "--out", str(out)])
    with pytest.raises(SystemExit) as exit:
        cli(train.main)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    for word in words:
        assert word in error
    assert not out.exists()


def test_a_failed_start_leaves_no_folder(tmp_path, monkeypatch, capsys):
    """What fails before the first step (here: too little text) leaves nothing that the mended command trips over."""
    (tmp_path / "short.txt").write_text("a few words")
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["train.py", "--teacher", "smollm2", "--data", str(tmp_path / "short.txt"), "--out",
                                          str(tmp_path / "run")])
        with pytest.raises(UserError, match="too few"):
            train.main()
        assert not (tmp_path / "run").exists()


def test_all(tmp_path, monkeypatch, capsys):
    """--variant all: one table, in the rows' order; a second call trains nothing, a broken row is named and the rest stand."""
    monkeypatch.setattr(train, "all_rows", lambda *_: ["swa", "gdn"])
    monkeypatch.setattr(sys, "argv", ["train.py", "--variant", "all", *TINY, "--out", str(tmp_path / "all")])
    tables = []
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            train.main()
        assert ended.value.code == 0
        tables.append((capsys.readouterr().out, [(f, f.stat().st_mtime_ns) for f in sorted((tmp_path / "all").rglob("*.jsonl"))]))
    assert tables[0] == tables[1]
    last = json.loads(tables[0][0].splitlines()[-1])
    assert [row["name"] for row in last["variants"]] == ["swa", "gdn"]
    metrics = json.loads((tmp_path / "all" / "gdn" / "metrics.json").read_text())
    row = last["variants"][1]
    assert row["long"] == (metrics["lengths"]["32"]["exact"] + metrics["lengths"]["60"]["exact"]) / 2
    assert row["bytes_per_layer"] == 8 * 16 * 16 * 4 + 3 * (8 + 2 + 2) * 16 * 4 and 0 <= row["look_up"] <= 1 and 0 <= row["copy"] <= 1
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--lr", "0.5"])
    with pytest.raises(UserError, match="--lr None, not 0.5"):
        train.main()
    monkeypatch.setattr(sys, "argv", sys.argv[:-2])
    (tmp_path / "all" / "gdn" / "config.json").write_text("{")
    with pytest.raises(SystemExit) as ended:
        train.main()
    out = capsys.readouterr()
    assert ended.value.code == 1 and "gdn failed" in out.err and "config.json" in out.err
    assert [row["name"] for row in json.loads(out.out.splitlines()[-1])["variants"]] == ["swa"]


def test_all_rows():
    names = train.all_rows(MINI, 72)
    assert "full" not in names and "liger_gla_strict" not in names and "bifocal_strict" in names
    assert set(names) | {"full", "liger_gla_strict"} == set(VARIANTS)


def test_default_folder_names_the_teacher(tmp_path):
    """README's two trainings of the same variant, on the miniature and on a real model, do not meet in one folder."""
    names = [train.default_out(combine("bifocal", far, mix, row), t) for t, far, mix, row in (
        ("mini", None, None, []), ("smollm2", None, None, []), (str(tmp_path / "Qwen3-4B"), None, None, []),
        ("mini", "gdn", "half", ["keep=2"]))]
    assert names == ["runs/bifocal", "runs/bifocal-smollm2", "runs/bifocal-Qwen3-4B", "runs/bifocal+gdn+half+keep=2"]


def test_cuda_is_refused_where_there_is_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["train.py", "--device", "cuda", "--out", str(tmp_path / "never")])
    with pytest.raises(SystemExit):
        cli(train.main)
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file/run", "file", "other"])
def test_out_is_in_the_way(place, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["train.py", *TINY, "--out", str(tmp_path / place)])
    with pytest.raises(SystemExit) as exit:
        cli(train.main)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and error.count("\n") == 1 and str(tmp_path / place) in error
    assert (tmp_path / "file").read_text() == "mine" and os.listdir(tmp_path / "other") == ["thesis.tex"]


def test_parameters_are_new_or_the_teachers():
    teacher = {n for n, _ in build(MINI, "full").named_parameters()}
    for name in ("bifocal", "mlstm", "swa_learned_sink"):
        names = {n for n, _ in build(MINI, name).named_parameters()}
        assert {n for n in names if not is_new(n)} == teacher and any(map(is_new, names))


def test_hugging_face_folder(tmp_path):
    """A Qwen3 folder as `transformers` saves it, text from a file: both stages, then eval.py text."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    text = tmp_path / "data.txt"
    text.write_text((ROOT / "reference.py").read_text())
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level
    tokenizer.train([str(text)], tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=byte_level.alphabet(), show_progress=False))
    folder = tmp_path / "qwen3"
    config = transformers.Qwen3Config(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
                                      num_key_value_heads=2, head_dim=8, vocab_size=420, max_position_embeddings=99)
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    without = run("--teacher", folder, "--data", text, "--out", tmp_path / "never")
    assert without.returncode == 2 and "tokenizer.json" in without.stderr
    tokenizer.save(str(folder / "tokenizer.json"))

    out = tmp_path / "run"
    args = ["--teacher", folder, "--data", text, "--length", 40, "--budget", 20, *TINY, "--out", out]
    done = run("--variant", "bifocal", *args)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])["held_out_loss"]
    assert list(result) == ["teacher", "swa_sink_tokens, untrained", "bifocal, untrained", "bifocal, trained"]
    assert all(0 < loss < 20 for losses in result.values() for loss in losses.values())
    assert json.loads((out / "config.json").read_text())["window"] == 12
    read = subprocess.run([sys.executable, str(ROOT / "eval.py"), "text", out, "--text", text, "--length", "90", "--ranges", "0:"],
                          capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    assert json.loads(read.stdout.splitlines()[-1])["window"] == 12
    cut = folder / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    broken = run("--variant", "bifocal", *args, "--out", tmp_path / "other")
    assert broken.returncode == 2 and "cut short" in broken.stderr and broken.stderr.count("\n") == 1


def test_one_process_a_folder(tmp_path, monkeypatch, capsys):
    """A folder that another process trains in is refused by that process's number, and left as it is; so is one run's for the table."""
    out = tmp_path / "run"
    first = subprocess.Popen(command("--out", str(out), "--steps", "100000"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_lines(first, out, 2)
        second = run("--out", str(out), "--steps", "100000", "--resume")
        assert second.returncode == 2 and f"is being trained by process {first.pid}" in second.stderr
    finally:
        first.kill()
        first.wait()
    monkeypatch.setattr(sys, "argv", ["train.py", "--variant", "all", "--out", str(out)])
    with pytest.raises(UserError, match="folder of one run"):
        train.main()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="an orphan gets a new parent: POSIX")
def test_a_row_ends_with_the_table_that_started_it(tmp_path):
    """--variant all killed outright: its rows save their state and stop, and the same command can go on."""
    flags = [sys.executable, train.__file__, "--variant", "all", "--jobs", "1", "--out", str(tmp_path), "--steps", "100000", "--batch", "1"]
    table = subprocess.Popen(flags, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    name = train.all_rows(MINI, 72)[0]
    try:
        wait_for_lines(table, tmp_path / name, 2)
    finally:
        table.kill()
        table.wait()
    for _ in range(100):
        if "interrupted: the state is saved" in (tmp_path / f"{name}.txt").read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the row still runs")
    assert (tmp_path / name / "checkpoint" / "state.pt").exists()
