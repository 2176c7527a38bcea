"""The main job: what it writes, what it refuses, and that being killed changes nothing."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import data
import pytest
import report
import torch
import train
import wandb
from model import Config, LanguageModel
from tensordict import TensorDict

import veofunc as vf

STEPS, LOG_EVERY, SAVE_EVERY = 9, 4, 3  # windows and checkpoints end at different steps
SETTINGS = (
    f"--steps={STEPS} --log-every={LOG_EVERY} --save-every={SAVE_EVERY} --batch-size=4 --device=cpu"
).split()


@pytest.fixture(autouse=True)
def wandb_disabled(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run that nobody disturbed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        train.main([*SETTINGS, f"--out={out}"])
    wandb.teardown()
    return out


def final_state(out):
    """All leaves of the newest checkpoint, and the metrics without those that measure time."""
    model = LanguageModel(Config())
    template = vf.train_state(model, torch.optim.AdamW(model.parameters()))
    with vf.async_checkpointer(template, out / "checkpoints") as ckpt:
        state = ckpt.restore(template)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return state, [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def assert_bit_equal(out, expected):
    (state, metrics), (expected_state, expected_metrics) = final_state(out), final_state(expected)
    assert metrics == expected_metrics
    leaves = dict(state.items(include_nested=True, leaves_only=True))
    expected_leaves = dict(expected_state.items(include_nested=True, leaves_only=True))
    assert leaves.keys() == expected_leaves.keys()
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves.values()) > 50
    for name, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            assert torch.equal(as_bytes(leaf), as_bytes(expected_leaves[name])), name
        else:
            assert leaf == expected_leaves[name], name


def as_bytes(leaf):
    return leaf.reshape(-1).view(torch.uint8)


def test_logs_every_window_and_the_rest(finished):
    lines = report.read_metrics(finished)
    assert [line["step"] for line in lines] == [4, 8, 9]
    for line in lines:
        losses = [line[f"channel_loss/{name}"] for name in data.CHANNELS]
        counts = [line[f"channel_tokens/{name}"] for name in data.CHANNELS]
        mean = sum(a * b for a, b in zip(losses, counts, strict=True)) / sum(counts)
        assert line["loss"] == pytest.approx(mean, rel=1e-6)
        assert line["moe/max_vio/max"] >= 0


def test_loss_falls_in_a_few_steps(finished):
    first, *_, last = report.read_metrics(finished)
    assert last["loss"] < first["loss"] - 0.5


def test_counts_every_token_that_has_a_label_once(finished):
    corpus = data.load_corpus()
    expected = dict.fromkeys(data.CHANNELS, 0)
    for step in range(1, STEPS + 1):
        batch = data.make_batch(corpus, 0, step, batch_size=4, num_tokens=256)
        labels, channel = batch["labels"].flatten().tolist(), batch["channel"].flatten().tolist()
        for label, c in zip(labels, channel, strict=True):
            expected[data.CHANNELS[c]] += label != data.IGNORE_INDEX
    lines = report.read_metrics(finished)
    for name in data.CHANNELS:
        assert sum(line.get(f"channel_tokens/{name}", 0) for line in lines) == expected[name]


def test_writes_figures_a_checkpoint_and_an_offline_wandb_run(finished):
    for name in ("router_heatmap.png", "router_violation.png", "channel_loss.png"):
        assert (finished / name).read_bytes().startswith(b"\x89PNG")
    state, _ = final_state(finished)
    assert state["step"] == STEPS
    assert list((finished / "wandb").glob("offline-run-*"))


def changes_in(folder) -> dict:
    """When each file was changed; the lock says who came last."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: path.stat().st_mtime_ns for path in files}


def test_finished_run_started_again_prints_the_table_and_changes_nothing(finished, capsys):
    before = changes_in(finished)
    train.main([*SETTINGS, f"--out={finished}"])
    printed = capsys.readouterr().out
    assert f"has finished {STEPS} steps" in printed
    assert all(name in printed for name in data.CHANNELS)
    assert changes_in(finished) == before


@pytest.mark.parametrize("step", [1, 6, STEPS])
def test_interrupted_run_goes_on_to_the_same_bits(step, finished, tmp_path, monkeypatch, capsys):
    make_batch = data.make_batch

    def interrupted(corpus, seed, at, *size):
        if at == step:
            raise KeyboardInterrupt
        return make_batch(corpus, seed, at, *size)

    command = [*SETTINGS, f"--out={tmp_path / 'run'}"]
    monkeypatch.setattr(data, "make_batch", interrupted)
    with pytest.raises(SystemExit, match="130"):
        train.main(command)
    assert "stopped; the same command goes on" in capsys.readouterr().err
    monkeypatch.setattr(data, "make_batch", make_batch)
    train.main(command)
    resumed = (step - 1) // SAVE_EVERY * SAVE_EVERY
    assert (f"after step {resumed}\n" in capsys.readouterr().out) == (resumed > 0)
    assert_bit_equal(tmp_path / "run", finished)


def test_larger_steps_go_on_from_a_finished_run(finished, tmp_path):
    shorter = [*SETTINGS, "--steps=5", f"--out={tmp_path / 'run'}"]
    train.main(shorter)
    train.main([*SETTINGS, f"--out={tmp_path / 'run'}"])
    (state, _), (expected, _) = final_state(tmp_path / "run"), final_state(finished)
    for name, leaf in expected["model"].items(include_nested=True, leaves_only=True):
        assert torch.equal(state["model"][name], leaf), name


TWO_THREADS = pytest.param(
    "--threads=2", marks=pytest.mark.skipif(os.cpu_count() < 2, reason="needs two CPUs")
)


@pytest.mark.parametrize("change", ["--seed=1", "--batch-size=2", "--log-every=5", TWO_THREADS])
def test_run_that_could_not_go_on_exactly_is_refused(change, finished):
    with pytest.raises(SystemExit, match=r"holds a run with \w+ \w+ \(now \w+\).*another --out"):
        train.main([*SETTINGS, f"--out={finished}", change])


def test_no_resume_refuses_a_directory_with_a_run(finished):
    with pytest.raises(SystemExit, match="holds a run; choose another --out"):
        train.main([*SETTINGS, f"--out={finished}", "--no-resume"])


def test_directory_with_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(SystemExit, match="holds something else than a run"):
        train.main([*SETTINGS, f"--out={tmp_path}"])
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_directory_of_a_living_run_is_refused_and_left_alone(finished):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    with (finished / "run.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="is in use by another run"):
            train.main([*SETTINGS, "--steps=12", f"--out={finished}"])
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_directory_is_locked_while_a_run_trains_and_reports(tmp_path, monkeypatch):
    out = tmp_path / "run"

    def assert_locked(*arguments):
        with (out / "run.json").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "locked"

    monkeypatch.setattr(train, "train", assert_locked)
    monkeypatch.setattr(report, "table", assert_locked)
    train.main([*SETTINGS, f"--out={out}"])


def test_out_that_is_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="file cannot hold a run: Not a directory"):
        train.main([*SETTINGS, f"--out={tmp_path / 'file'}"])


@pytest.mark.parametrize("content", ["{", '{"seed": "0"}'])
def test_damaged_settings_are_refused_by_name(content, tmp_path):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(SystemExit, match=r"run.json is damaged: it must hold seed, device, "):
        train.main([*SETTINGS, f"--out={tmp_path}"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--steps=0", "must be an integer of at least 1, got '0'"),
        ("--batch-size=many", "must be an integer of at least 1, got 'many'"),
        ("--seed=-1", "must be an integer of at least 0, got '-1'"),
        ("--seed=4294967296", "must be at most 4294967295, numpy's largest seed, got '4294967296'"),
        ("--threads=100000", f"must be at most {os.cpu_count()}, this machine's number of CPUs, got"),
        ("--device=abacus", "'abacus' cannot be used"),
        ("--device=meta", "'meta' cannot be used"),
        ("--device=privateuseone", "'privateuseone' cannot be used"),
    ],
)
def test_wrong_option_is_refused_by_name_and_claims_nothing(option, message, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        train.main([option, f"--out={tmp_path / 'run'}"])
    error = capsys.readouterr().err
    assert f"argument {option.split('=')[0]}: {message}" in error
    assert not list(tmp_path.iterdir())


def test_ctrl_c_ends_without_a_traceback(monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(train.data, "load_corpus", interrupted)
    with pytest.raises(SystemExit, match="130"):
        train.main([])
    assert "the same command goes on" in capsys.readouterr().err


def test_balance_moves_each_bias_against_the_load():
    model = LanguageModel(Config(num_layers=2, num_experts=3))
    loads = torch.tensor([[5, 1, 3], [0, 0, 9]])
    obs = TensorDict({"router": {"tokens_per_expert": loads}})
    routers = vf.find_routers(model, torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4))
    train.balance_(model, routers, obs)
    rate = train.BALANCE_RATE
    for layer, steps in enumerate(([-1, 1, 0], [1, 1, -1])):  # the mean load is 3
        bias = model.layers[layer].moe.router.bias
        torch.testing.assert_close(bias, torch.tensor([rate * step for step in steps]))


KILLED_AT_STEP_7 = """
import os, signal, sys, data, train

make_batch = data.make_batch
def killed(corpus, seed, step, *size):
    if step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return make_batch(corpus, seed, step, *size)

data.make_batch = killed
train.main(sys.argv[1:])
"""


def test_killed_run_goes_on_to_the_same_bits(finished, tmp_path):
    """SIGKILL in the middle of a window, while the checkpoint of step 6 is on its way to disk."""
    command = [*SETTINGS, f"--out={tmp_path / 'run'}"]
    assert start(["-c", KILLED_AT_STEP_7, *command]).wait() == -signal.SIGKILL
    train.main(command)
    assert_bit_equal(tmp_path / "run", finished)


@pytest.mark.slow
def test_ten_kills_change_nothing(tmp_path):
    """SIGKILL at ten random moments: during imports and resume, and between checkpoints."""
    command = [train.__file__, *SETTINGS, "--steps=300", "--log-every=10"]
    expected, out = tmp_path / "expected", tmp_path / "run"
    assert start([*command, f"--out={expected}"]).wait() == 0
    for kill in range(10):
        before = newest_checkpoint(out)
        process = start([*command, f"--out={out}"])
        if kill % 2:
            while process.poll() is None and newest_checkpoint(out) == before:
                time.sleep(0.05)
            time.sleep(random.uniform(0, 2))
        else:
            time.sleep(random.uniform(0, 10))
        process.kill()
        assert process.wait() == -signal.SIGKILL, "over before it could be killed: give it more steps"
    assert start([*command, f"--out={out}"]).wait() == 0
    assert_bit_equal(out, expected)


def newest_checkpoint(out):
    """Its number, read from the directory's name; 0 if there is none."""
    names = [path.name for path in (out / "checkpoints").glob("step_*")]
    return max((int(name[5:]) for name in names if name[5:].isdecimal()), default=0)


def start(arguments):
    """A new Python, which finds veofunc and the examples."""
    examples = Path(train.__file__).parent
    path = os.pathsep.join([str(examples.parent), str(examples)])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL)
