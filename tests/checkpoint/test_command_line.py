"""`python -m veofunc.checkpoint`: what it prints, and with what code it exits."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensordict import NonTensorData, TensorDict

from veofunc.checkpoint import async_checkpointer
from veofunc.checkpoint.__main__ import main
from veofunc.checkpoint.manifest import Entry, read_complete, to_bytes
from veofunc.checkpoint.storage import open_storage


def state_of(step: int) -> TensorDict:
    weight = torch.full((16, 4), float(step))
    return TensorDict(
        {
            "model": {"w": weight, "tied": weight, "b": torch.zeros(16).bfloat16()},
            "optimizer": {"m": torch.zeros(1 << 20)},
            "step": NonTensorData(step),
            "config": NonTensorData({"name": "n" * 100}),
            "loader": {"epoch": NonTensorData(3)},
        }
    )


def save(directory, *steps: int) -> None:
    with async_checkpointer(state_of(0), directory) as ckpt:
        for step in steps:
            ckpt.save(state_of(step), step, metrics={"loss": 0.25, "accuracy": 1})


@pytest.fixture
def directory(tmp_path) -> Path:
    """Steps 1, 20 and 300, and what else can lie there."""
    directory = tmp_path / "steps"
    save(directory, 1, 20, 300)
    for name in (".unfinished-step_4-abc", ".damaged-step_5-abc", ".replaced-step_6-abc", "notes"):
        (directory / name).mkdir()
    return directory


@pytest.fixture
def run(capsys):
    def run(*arguments: object) -> tuple[int, list[str], list[str]]:
        """Exit code, lines of stdout, lines of stderr."""
        try:
            code = main([*map(str, arguments)])
        except SystemExit as exit:  # of argparse
            code = exit.code
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return run


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def all_in(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in (directory, *directory.rglob("*"))}


def test_list_has_a_line_for_each_step_and_for_what_else_lies_there(run, directory):
    code, out, err = run("list", directory)
    assert (code, err) == (0, [])
    assert out[0].split() == ["step", "saved", "size", "ranks", "slots", "state"]
    for line, step in zip(out[1:4], (1, 20, 300), strict=True):
        found, date, time, *rest = line.split()
        assert found == str(step)
        assert (len(date), len(time)) == (10, 8)
        assert rest == ["4", "MiB", "1", "model", "optimizer", "complete"]
    assert len({line.index("complete") for line in out[1:4]}) == 1
    assert out[4] == ""
    assert [line.split()[:3] for line in out[5:]] == [
        [".damaged-step_5-abc", "set", "aside,"],
        [".replaced-step_6-abc", "replaced", "by"],
        [".unfinished-step_4-abc", "unfinished:", "being"],
    ]


def test_list_says_what_is_wrong_with_a_step(run, directory):
    (directory / "step_1" / "manifest.json").unlink()
    flip_last_byte(directory / "step_20" / "manifest.json")
    (directory / "step_300" / "model" / "index.json").unlink()
    code, out, _ = run("list", directory)
    assert code == 0
    for line, text in zip(
        out[1:4],
        ("manifest.json: No such", "manifest.json: differs", "model/index.json: No such"),
        strict=True,
    ):
        assert f"damaged: {text}" in line


def test_list_of_an_empty_directory(run, tmp_path):
    assert run("list", tmp_path) == (0, [f"no steps in {tmp_path}"], [])


def test_verify_reads_everything_and_names_all_that_is_damaged(run, directory):
    code, out, err = run("verify", directory)
    assert (code, err) == (0, [])
    assert [line[:14] for line in out] == ["step   1  good", "step  20  good", "step 300  good"]
    for file in ("model/__0_0.distcp", "optimizer/.metadata"):
        flip_last_byte(directory / "step_20" / file)
    (directory / "step_300" / "manifest.json").unlink()
    code, out, _ = run("verify", directory)
    assert code == 1
    assert out[0].startswith("step   1  good     4 MiB in 6 files")
    assert out[1].startswith("step  20  damaged  ")
    assert "model/__0_0.distcp: its CRC-32 is" in out[1]
    assert "; optimizer/.metadata: its CRC-32 is" in out[1]
    assert out[2].startswith("step 300  damaged  manifest.json: No such file")
    assert run("verify", directory, "--step", 1)[0] == 0
    assert run("verify", directory, "--step", 20)[0] == 1


def test_show_says_what_a_step_holds(run, directory):
    code, out, err = run("show", directory)
    assert (code, err) == (0, [])
    lines = [line.split() for line in out]
    assert out[0] == f"{directory}/step_300"
    assert lines[1][3:] == ["by", "1", "rank"]
    assert lines[2][:2] == ["with", "veofunc"] and lines[2][-1] == torch.__version__
    assert lines[3] == ["size", "4", "MiB", "in", "6", "files"]
    for expected in (
        ["loss", "0.25"],
        ["accuracy", "1"],
        ["step", "300"],
        ["loader.epoch", "of", "rank", "0", "3"],
        ["model", "3", "tensors", "288", "bytes"],
        ["optimizer", "1", "tensors", "4", "MiB"],
    ):
        assert expected in lines
    (config,) = (line for line in out if line.startswith("  config"))
    assert config.endswith('{"name": "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn...')
    assert not any("tensors of" in line for line in out)


def test_show_lists_all_tensors_if_asked(run, directory):
    _, out, _ = run("show", directory, "--step", 20, "--tensors")
    lines = [line.split() for line in out]
    start = lines.index(["tensors", "of", "model"])
    assert lines[start + 1 : start + 4] == [
        ["model.w", "float32", "[16,", "4]", "256", "bytes"],
        ["model.tied", "float32", "[16,", "4]", "as", "model.w"],
        ["model.b", "bfloat16", "[16]", "32", "bytes"],
    ]
    assert lines[-1] == ["optimizer.m", "float32", "[1048576]", "4", "MiB"]


def test_show_gives_of_values_that_each_rank_has_those_of_the_first(run, directory):
    manifest = read_complete(open_storage(directory), 300)
    others = tuple(Entry(("loader", "epoch"), "json", rank=rank, value=9) for rank in (1, 2))
    content = to_bytes(replace(manifest, world_size=3, values=(*manifest.values, *others)))
    (directory / "step_300" / "manifest.json").write_bytes(content)
    _, out, _ = run("show", directory)
    assert out[1].endswith(" by 3 ranks")
    assert "  loader.epoch of rank 0 (and of 2 more)  3" in out
    assert not any("of rank 1" in line for line in out)


def test_export_writes_a_file_that_safetensors_reads(run, directory, tmp_path):
    file = tmp_path / "model.safetensors"
    code, out, err = run("export", directory, file, "--step", 20)
    assert (code, out, err) == (0, [f"step 20: 3 tensors of model, 544 bytes, verified, to {file}"], [])
    assert load_file(file)["tied"].unique().tolist() == [20]
    code, out, err = run("export", directory, file, "--section", "optimizer")
    assert (code, out) == (2, [])
    assert err == [f"error: {file} exists; take another name, or replace it with force=True (--force)"]
    assert run("export", directory, file, "--section", "optimizer", "--force")[0] == 0
    assert list(load_file(file)) == ["m"]


def test_damage_is_an_error_with_code_1(run, directory, tmp_path):
    flip_last_byte(directory / "step_20" / "model" / "__0_0.distcp")
    flip_last_byte(directory / "step_20" / "model" / "index.json")
    for command in (("show", directory), ("export", directory, tmp_path / "a")):
        code, out, err = run(*command, "--step", 20)
        assert (code, out) == (1, [])
        assert len(err) == 1 and err[0].startswith(f"error: {directory}/step_20/model/index.json: its CRC-32")


def test_the_newest_complete_step_is_shown_and_what_is_skipped_said(run, directory):
    (directory / "step_300" / "manifest.json").unlink()
    code, out, err = run("show", directory)
    assert (code, out[0]) == (0, f"{directory}/step_20")
    assert len(err) == 1 and err[0].startswith("warning: step 300 is skipped: ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["list", "nowhere"], "error: there is nothing at "),
        (["list", "memory://nowhere"], "error: there is nothing at memory://nowhere"),
        (["list", "nothing://x"], "error: Protocol not known: nothing"),
        (["list", __file__], "is a file"),
        (["verify", "."], "error: there is no step in "),
        (["show", "."], "error: there is no complete step in "),
        (["show", "steps", "--step", "7"], "error: there is no step 7 in "),
        (["verify", "steps", "--step", "-7"], "error: step must be at least 0, got -7"),
        (["verify", "steps", "--step", "x"], "invalid int value: 'x'"),
        (["export", "steps", "a", "--section", "x"], "error: section must be one of ['model', 'optimizer']"),
        (["export", "steps", "nowhere/a"], "error: nowhere/a cannot be written"),
        (["export", "steps"], "required: FILE.safetensors"),
        (["list"], "required: DIR"),
        ([], "required: COMMAND"),
    ],
)
def test_what_cannot_be_done_is_an_error_with_code_2(arguments, text, run, tmp_path, monkeypatch):
    save(tmp_path / "steps", 1)
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert (code, out) == (2, [])
    assert text in err[-1]


def test_nothing_is_changed_or_locked(run, directory, tmp_path):
    before = all_in(directory)
    with async_checkpointer(state_of(0), tmp_path / "other") as ckpt:  # a run that writes
        ckpt.save(state_of(1), 1).result()
        for where in (directory, tmp_path / "other"):
            for command in (["list"], ["verify"], ["show", "--tensors"]):
                assert run(command[0], where, *command[1:])[0] == 0
        run("export", directory, tmp_path / "a")
        ckpt.save(state_of(2), 2)
    assert all_in(directory) == before
    assert ckpt.steps() == (1, 2)


def test_a_url_will_do(run, tmp_path):
    url = "memory://command_line/steps"
    save(url, 1, 2)
    assert [line.split()[-1] for line in run("list", url)[1]] == ["state", "complete", "complete"]
    assert run("verify", url)[0] == 0
    assert run("show", url)[1][0] == f"{url}/step_2"
    assert run("export", url, tmp_path / "a")[0] == 0
    assert load_file(tmp_path / "a")["w"].unique().tolist() == [2]


def test_as_a_program_it_prints_and_exits_the_same_way(directory):
    command = [sys.executable, "-W", "error", "-m", "veofunc.checkpoint", "verify", str(directory)]
    flip_last_byte(directory / "step_20" / "model" / "__0_0.distcp")
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert [line.split()[2] for line in done.stdout.splitlines()] == ["good", "damaged", "good"]


def test_a_pipe_that_is_closed_early_is_no_traceback(directory):
    source = f"""
import sys
from veofunc.checkpoint.__main__ import main
sys.stdin.read()  # until nobody reads
sys.exit(main(["show", {str(directory)!r}]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")
