"""What users of other checkpoint libraries reported, tried on ours: each test cites its report.

"pytorch #191391" and the like are issues or pull requests of that project, and "DCP" is what was measured
of torch.distributed.checkpoint 2.13. "Statement" is one of 35 that the documentation and reviews of VeOmni
make; those about its own files and options (1, 3, 4, 8, 9, 14, 15, 18, 19, 21, 22, 26 to 29, 32) have no
counterpart here. `ELSEWHERE` says which other tests show the rest, and
`distributed/test_checkpoint_reports.py` tries what takes several ranks.

This file is also the script of the processes that are killed, or end, while they save.
"""

import contextlib
import enum
import gc
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import warnings
import zipfile
from pathlib import Path
from random import Random

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensordict import NonTensorData, TensorDict
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import veofunc as vf
from tests.checkpoint.support import flip, names_in, state_of, until, values_of
from tests.limits import children, largest_file, small_disk
from veofunc.checkpoint import CheckpointError, async_checkpointer

FILES = Path(__file__).parents[1]
NUMEL = 1 << 18  # of each of three tensors: three MiB in all, so that a limit can be in their middle
MIB = 1 << 20

ELSEWHERE = {
    "checkpoint/test_storage.py": {
        "Lightning #19294: moved": "test_a_directory_may_be_moved_but_a_step_not_renamed",
    },
    "checkpoint/test_checkpointer.py": {
        "DCP: dtypes, 0-dim, empty, not contiguous": "test_every_dtype_comes_back_bit_for_bit",
        "DCP: values that are no tensors, also None": "test_json_values_come_back_as_they_were",
        "DCP: sparse and meta tensors; pytorch's other odd leaves": (
            "test_a_leaf_that_cannot_be_saved_is_named_before_anything_is_written"
        ),
        'DCP: {"a.b": x, "a": {"b": y}}': "test_two_leaves_of_the_same_name_on_disk_are_refused",
        "DCP: a missing key names only the first; other shapes": (
            "test_all_differences_are_listed_at_once_before_anything_is_read"
        ),
        "DCP: Python objects changed after the save": "test_json_may_change_right_after_save",
        "torchtitan #930: restore while a save is pending": "test_restore_waits_for_the_pending_save",
        "Lightning #20953, new C: changed right after the save": (
            "test_saves_that_overlap_with_changes_hold_one_step_each"
        ),
        "flax #1200: numeric order": "test_steps_are_ordered_by_number",
        "marin #5386: the newest is corrupt": (
            "test_a_damaged_newest_step_is_skipped_and_named_an_error_that_says_what_to_do"
        ),
        "VeOmni: step 0 (25 and statement 17)": "test_step_zero_is_a_step",
        "statement 13: not twice": "test_a_step_that_exists_is_not_saved_again",
        "statement 34: what may be missing": (
            "test_not_strict_keeps_what_was_not_saved_and_leaves_out_what_is_not_wanted"
        ),
    },
    "checkpoint/test_signals.py": {
        "orbax #3406: signals cannot be handled": (
            "test_outside_of_the_main_thread_it_says_so_and_the_rest_works"
        ),
        "statement 12: told to end, the last save is waited for": (
            "test_a_process_that_gets_a_signal_saves_its_step_and_ends_well"
        ),
    },
    "checkpoint/test_process.py": {
        "DCP: after the daemon died every save fails": "test_a_writer_killed_while_writing_fails_one_save",
    },
    "checkpoint/test_writer.py": {
        "DCP: the daemon imports the main module again": "test_the_process_needs_the_standard_library_alone",
    },
    "checkpoint/test_manifest.py": {
        "statement 23: a garbled manifest is none": "test_a_manifest_that_is_none_is_damaged",
    },
    "faults/test_checkpoint_faults.py": {
        "DCP: a .distcp of another step": "    def test_a_file_of_another_step_is_found",
        "DCP: a file deleted or truncated, also .metadata": (
            "    def test_latest_skips_a_step_with_a_damaged_file_and_says_why"
        ),
        "DCP: errors of the background, at result()": (
            "    def test_raises_at_result_and_names_rank_file_and_cause"
        ),
        "DCP: at wait()": "    def test_raises_at_wait",
        "DCP: at the next save": "    def test_raises_at_the_next_save_which_is_not_made",
        "DCP: on leaving": "    def test_raises_on_leaving",
    },
    "faults/test_checkpoint_kills.py": {
        "Lightning #688, #19970: killed at any moment": "test_killed_at_any_moment_nothing_is_torn_or_lost",
    },
    "faults/test_checkpoint_damage.py": {
        "no library detects bit rot": "test_every_damage_is_found_named_and_survived",
    },
    "test_state.py": {
        "statement 33: resumed exactly": "test_resuming_from_disk_is_bit_equal",
    },
    "test_rng.py": {
        "accelerate #4217, #3960: torch, numpy and Python": "test_the_next_draws_are_those_that_followed",
    },
}


@pytest.mark.parametrize("file", ELSEWHERE)
def test_what_is_tried_elsewhere_still_is(file):
    source = (FILES / file).read_text()
    names = [name if name.startswith(" ") else f"def {name}" for name in ELSEWHERE[file].values()]
    assert [name for name in names if f"\n{name}(" not in source] == []


def big(value: float, **sections) -> TensorDict:
    return state_of(value, NUMEL, **sections)


def section(value: float, numel: int = 16) -> TensorDict:
    return TensorDict({"w": torch.full((numel,), float(value))})


def failure_of(work) -> str:
    with pytest.raises(CheckpointError) as caught:
        work()
    return str(caught.value)


def slow(state, directory, seconds=0.6, **options):
    """A checkpointer that takes so long to write a state of that size."""
    nbytes = sum(x.nbytes for x in state.values(include_nested=True, leaves_only=True))
    return async_checkpointer(state, directory, bytes_per_second=nbytes / seconds, **options)


# ---- what is saved, and how large it is


def test_tensors_and_values_of_every_kind_come_back(tmp_path):
    """DCP: TensorDicts at the top and nested, parameters, tensors of a graph: fine there, and here."""
    leaf = torch.arange(6.0).reshape(2, 3).requires_grad_()
    deep = TensorDict({"b": TensorDict({"c": TensorDict({"d.e": torch.ones(2, 3).T})})})
    state = TensorDict({"model": TensorDict({"p": nn.Parameter(leaf.detach().T), "y": leaf * 2}), "a": deep})
    with async_checkpointer(state, tmp_path) as ckpt:
        ckpt.save(state, 1)
    restored = ckpt.restore(state)
    assert torch.equal(restored["model", "p"], leaf.T)
    assert torch.equal(restored["model", "y"], leaf * 2)
    assert not restored["model", "y"].requires_grad
    assert torch.equal(restored["a", "b", "c", "d.e"], torch.ones(3, 2))


def test_values_beside_tensors_are_kept_also_empty_ones(tmp_path):
    """new D: NonTensorData and empty dicts were dropped in silence; a dict came back flattened."""
    data = {"cfg": None, "list": [], "dict": {}, "nested": {"a.b": {"c": [None, {}]}}, "text": ""}
    inner = {name: NonTensorData(value) for name, value in data.items()}
    state = TensorDict({"model": section(1), "all": NonTensorData(data), "each": TensorDict(inner)})
    state["empty"] = TensorDict({"inner": TensorDict()})
    with async_checkpointer(state, tmp_path) as ckpt:
        ckpt.save(state, 1)
    for like in (state, TensorDict({"model": section(0)})):
        restored = ckpt.restore(like)
        assert restored["all"] == data
        assert {name: restored["each", name] for name in data} == data
        assert list(restored["empty"].keys()) == ["inner"]
        assert list(restored["empty", "inner"].keys()) == []


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value", [Colour.RED, Colour, int, object(), len, b"x", 1j], ids=lambda value: f"{value!r:.12}"
)
def test_an_odd_object_is_named_by_its_path(value, tmp_path):
    """torchtitan #3476: a class among the values failed as "<class 'type'>"."""
    state = big(1, data=TensorDict({"loader": NonTensorData({"workers": [0, {"kind": value}]})}))
    with pytest.raises(TypeError, match=r"data\.loader\.workers\.1\.kind must be a tensor, .* got "):
        async_checkpointer(state, tmp_path)


def test_odd_objects_in_the_state_of_a_loader_are_named_by_their_path():
    """torchtitan #3476, by way of `train_state`."""

    class Loader:
        def state_dict(self):
            return {"sampler": [Colour.RED]}

        def load_state_dict(self, state):
            raise AssertionError

    with pytest.raises(TypeError, match=r"loader\.sampler\.0 must be .* got Colour"):
        vf.train_state(nn.Linear(1, 1), loader=Loader())


def test_a_view_is_saved_at_its_own_size(tmp_path):
    """DCP: its stager keeps all of the storage of a view, and torch.save writes it."""
    storage = torch.arange(float(MIB))
    state = TensorDict({"model": TensorDict({"w": storage[7:407]})})
    with async_checkpointer(state, tmp_path) as ckpt:
        save = ckpt.save(state, 1)
        assert save.progress[1] < 4096
        assert sum(file.stat().st_size for file in save.result().rglob("*.distcp")) < 4096
    assert torch.equal(ckpt.restore(state)["model", "w"], storage[7:407])


def test_a_tied_tensor_is_written_once_and_tied_again(tmp_path):
    """DCP: written twice (2.10 MB for 1.05 MB)."""
    weight = torch.arange(float(NUMEL))
    tensors = {"embed": weight, "head": weight, "other": weight.clone()}
    state = TensorDict({"model": TensorDict(tensors)})
    with async_checkpointer(state, tmp_path) as ckpt:
        path = ckpt.save(state, 1).result()
    size = sum(file.stat().st_size for file in path.rglob("*.distcp"))
    assert 2 * weight.nbytes < size < 2.01 * weight.nbytes
    model = ckpt.restore(state)["model"]
    assert model["embed"].data_ptr() == model["head"].data_ptr() != model["other"].data_ptr()
    target = {name: torch.zeros(NUMEL) for name in tensors}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(target, checkpoint_id=path / "model")
    assert all(torch.equal(tensor, weight) for tensor in target.values())


def test_an_expanded_number_is_written_at_its_shape_which_is_all_that_dcp_can_read(tmp_path):
    """DCP: 4.0 MB for one number; its format has no strides, so neither do we."""
    state = TensorDict({"model": TensorDict({"w": torch.tensor(3.0).expand(NUMEL)})})
    with async_checkpointer(state, tmp_path) as ckpt:
        path = ckpt.save(state, 1).result()
    assert MIB < sum(file.stat().st_size for file in path.rglob("*.distcp")) < 1.01 * MIB
    restored = ckpt.restore(state)["model", "w"]
    assert restored.is_contiguous()
    assert torch.equal(restored, torch.full((NUMEL,), 3.0))


def test_thousands_of_tensors_need_no_descriptor_each(tmp_path):
    """DCP in a process: 10,000 tensors were "Too many open files"."""
    state = TensorDict({"model": TensorDict({f"w{i}": torch.full((2,), float(i)) for i in range(3000)})})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        with async_checkpointer(state, tmp_path) as ckpt:
            ckpt.save(state, 1)
        restored = ckpt.restore(state)["model"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [restored[f"w{i}"][0].item() for i in range(3000)] == [*range(3000)]


def test_torchs_converter_reads_a_slot(tmp_path):
    """DCP: `dcp_to_torch_save` is fine; and each item is an archive whose checksums are right."""
    with async_checkpointer(big(2), tmp_path / "steps") as ckpt:
        path = ckpt.save(big(2), 1).result()
    dcp_to_torch_save(path / "model", tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert {name: tensor.unique().tolist() for name, tensor in loaded.items()} == {
        f"layers.{i}": [2.0] for i in range(3)
    }
    index = json.loads((path / "model" / "index.json").read_text())
    for (piece,) in index["pieces"].values():
        _, _, file, start, _, length = piece.values() if isinstance(piece, dict) else piece
        item = (path / "model" / file).read_bytes()[start : start + length]
        assert zipfile.ZipFile(io.BytesIO(item)).testzip() is None


# ---- restoring


def test_a_failed_restore_leaves_the_state_as_it_is(tmp_path):
    """DCP: a failed load leaves the target half overwritten (4 of 8)."""
    state = big(1)
    with async_checkpointer(state, tmp_path) as ckpt:
        path = ckpt.save(state, 1).result()
    flip(path / "model" / "__0_0.distcp")
    like = big(7)
    assert "CRC-32" in failure_of(lambda: ckpt.restore(like, 1))
    assert values_of(like) == {7}


@pytest.mark.parametrize("cast", [False, True])
def test_a_float_is_not_read_into_an_int(cast, tmp_path):
    """DCP: [300.7, 2e9] came into an int8 tensor as [44, 0], in silence."""
    state = TensorDict({"model": TensorDict({"w": torch.tensor([300.7, 2e9])})})
    like = TensorDict({"model": TensorDict({"w": torch.zeros(2, dtype=torch.int8)})})
    with async_checkpointer(state, tmp_path) as ckpt:
        ckpt.save(state, 1)
    text = failure_of(lambda: ckpt.restore(like, cast=cast))
    assert "model.w: saved as float32[2], in the state int8[2]" in text


def test_what_was_saved_and_nobody_asks_for_is_an_error_that_names_all_of_it(tmp_path):
    """DCP: unexpected keys are ignored."""
    saved = {f"w{i}": torch.zeros(2) for i in range(3)}
    with async_checkpointer(TensorDict({"model": TensorDict(saved)}), tmp_path) as ckpt:
        ckpt.save(TensorDict({"model": TensorDict(saved)}), 1)
    like = TensorDict({"model": TensorDict({"w1": torch.zeros(2)})})
    text = failure_of(lambda: ckpt.restore(like))
    assert "model.w0: unexpected" in text
    assert "model.w2: unexpected" in text


def test_the_previous_step_can_be_read_while_one_is_written(tmp_path):
    """torchtitan #930: loading while an asynchronous save runs failed."""
    with slow(big(0), tmp_path) as ckpt:
        ckpt.save(big(1), 1).result()
        save = ckpt.save(big(2), 2)
        with async_checkpointer(big(0), tmp_path / "other") as other:
            assert other.latest() is None
        reader = async_checkpointer(big(0), tmp_path)
        assert values_of(reader.restore(big(0))) == {1}
        assert reader.latest() == 1
        assert not save.done
    assert reader.latest() == 2


def test_a_missing_random_state_is_an_error_and_not_silence(tmp_path):
    """accelerate #4283: that the random states could not be restored was swallowed."""
    model = nn.Linear(1, 1)
    with async_checkpointer(vf.train_state(model, rng=False), tmp_path) as ckpt:
        ckpt.save(vf.train_state(model, rng=False), 1)
    text = failure_of(lambda: ckpt.restore(vf.train_state(model)))
    names = ["torch", "numpy", "python"]
    assert [name for name in names if f"rng.{name}" not in text] == []
    for name in names:
        state = vf.train_state(model)
        del state["rng"][name]
        with pytest.raises(ValueError, match=f"rng.{name}.*: missing"):
            vf.load_train_state(state, model)


def test_a_damaged_random_state_is_an_error(tmp_path):
    """accelerate #4283: a corrupt file of random states was passed over."""
    model = nn.Linear(1, 1)
    with async_checkpointer(vf.train_state(model), tmp_path) as ckpt:
        path = ckpt.save(vf.train_state(model), 1).result()
    (file,) = (path / "rest").glob("*.distcp")
    flip(file)
    assert "rest/__0_0.distcp: its CRC-32" in failure_of(lambda: ckpt.restore(vf.train_state(model), 1))


# ---- damage


@pytest.mark.parametrize("share", [0.999, 0.95, 0.5, 0])
def test_a_truncated_file_is_named(share, tmp_path):
    """DCP: "failed finding central directory" or EOFError, with the target filled in part."""
    with async_checkpointer(big(1), tmp_path) as ckpt:
        path = ckpt.save(big(1), 1).result()
    file = path / "model" / "__0_0.distcp"
    os.truncate(file, int(share * file.stat().st_size))
    for work in (lambda: ckpt.verify(1), lambda: ckpt.restore(big(0), 1)):
        assert "step_1/model/__0_0.distcp: has " in failure_of(work)


def test_sixty_of_sixty_flipped_bits_are_found(tmp_path):
    """DCP loads 59 of 60 wrongly and 1 by luck; Orbax 30 of 30; torch_checkpointing, too."""
    with async_checkpointer(state_of(1, 4096), tmp_path) as ckpt:
        path = ckpt.save(state_of(1, 4096), 1).result()
    file = path / "model" / "__0_0.distcp"
    content, rng = file.read_bytes(), Random(0)
    for _ in range(60):
        flip(file, rng.randrange(len(content)), rng.randrange(8))
        assert "model/__0_0.distcp: its CRC-32" in failure_of(lambda: ckpt.restore(state_of(0, 4096), 1))
        file.write_bytes(content)
    assert values_of(ckpt.restore(state_of(0, 4096), 1)) == {1}


def test_lost_pages_are_found_and_the_file_is_named(tmp_path):
    """DCP: a quarter of zeros raises a text about `weights_only` without file or tensor."""
    with async_checkpointer(big(1), tmp_path) as ckpt:
        path = ckpt.save(big(1), 1).result()
    file = path / "model" / "__0_0.distcp"
    content, quarter = file.read_bytes(), file.stat().st_size // 4
    for start in range(0, 4 * quarter, quarter):
        file.write_bytes(content[:start] + bytes(quarter) + content[start + quarter :])
        text = failure_of(lambda: ckpt.restore(big(0), 1))
        assert "step_1/model/__0_0.distcp" in text
        assert "weights_only" not in text


def test_saved_again_in_fewer_files_nothing_old_is_left(tmp_path):
    """DCP: `__0_1.distcp` to `__0_3.distcp` of the earlier save stay for ever."""
    for number, value in ((4, 1), (1, 2)):
        with async_checkpointer(big(0), tmp_path, files_per_rank=number) as ckpt:
            path = ckpt.save(big(value), 1, overwrite=True).result()
            assert len([*(path / "model").glob("*.distcp")]) == min(number, 3)
    assert values_of(ckpt.restore(big(0), 1)) == {2}
    assert names_in(tmp_path) == ["step_1"]


# ---- writes that fail


@pytest.mark.parametrize("files_per_rank", [1, 4, 16])
def test_a_full_disk_says_so_and_the_next_save_works(files_per_rank, tmp_path):
    """DCP: "unexpected pos 704 vs 598"; the real cause only with 16 threads, by accident."""
    with small_disk(tmp_path, 6 * MIB) as disk:
        (disk / "other").write_bytes(bytes(2 * MIB))
        with async_checkpointer(big(0), disk / "steps", files_per_rank=files_per_rank) as ckpt:
            ckpt.save(state_of(1), 1).result()
            text = failure_of(ckpt.save(state_of(2, 3 * NUMEL), 2).result)
            assert "No space left on device" in text
            assert "step_2" in text and ".distcp" in text
            assert int(text.split("needs ")[1].split()[0]) > 2 * MIB
            assert int(text.split("bytes, ")[1].split()[0]) < 4 * MIB
            assert ckpt.latest() == 1
            assert names_in(disk / "steps") == ["step_1"]
            (disk / "other").unlink()
            ckpt.save(big(3), 3).result()
            ckpt.verify(3)


@pytest.mark.parametrize("copy", [True, False], ids=["copied", "in place"])
def test_one_of_several_files_that_cannot_be_written_fails_the_save(copy, tmp_path):
    """pytorch #191391, DCP: an error of one of several writers was lost, and the save reported as good."""
    tensors = {f"w{i}": torch.full((MIB // 4 << (3 * (i == 2)),), 1.0) for i in range(4)}
    state = TensorDict({"model": TensorDict(tensors)})
    with async_checkpointer(state, tmp_path, files_per_rank=4, copy=copy) as ckpt:
        ckpt.save(state, 1).result()
        with largest_file(4 * MIB):
            text = failure_of(ckpt.save(state, 2).result)
        assert "rank 0" in text and "File too large" in text and "/model/__0_" in text
        assert ckpt.latest() == 1
        assert names_in(tmp_path) == ["step_1"]
        path = ckpt.save(state, 2).result()
        assert len([*path.glob("model/*.distcp")]) == 4
        ckpt.verify(2)


@contextlib.contextmanager
def read_only(directory: Path):
    """While the block runs, nothing can be written there, also by root."""
    if os.geteuid():
        directory.chmod(0o555)
        yield
        directory.chmod(0o755)
        return
    bound = shutil.which("mount") and not subprocess.run(["mount", "--bind", directory, directory]).returncode
    if not bound:
        pytest.skip("root can write anywhere unless it may mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", directory], check=True)
        yield
    finally:
        subprocess.run(["umount", directory], check=True)


def test_a_directory_that_became_read_only_fails_the_save_and_not_the_next(tmp_path):
    """DCP: what is not ENOSPC; the cause must be said whatever it is."""
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        ckpt.save(state_of(1), 1).result()
        with read_only(tmp_path):
            text = failure_of(ckpt.save(state_of(2), 2).result)
            assert f"'{tmp_path}/" in text and ("Read-only" in text or "Permission" in text)
            assert values_of(ckpt.restore(state_of(0))) == {1}
        ckpt.save(state_of(2), 2)
    assert ckpt.steps() == (1, 2)


def test_a_directory_that_is_read_only_can_be_read(tmp_path):
    """As others publish their steps: no lock can be made there, and none is needed."""
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        ckpt.save(state_of(1), 1)
    (tmp_path / ".lock").unlink()
    with read_only(tmp_path):
        with pytest.warns(RuntimeWarning, match=r"nobody here \(.*can read, and not save"):
            reader = async_checkpointer(state_of(0), tmp_path)
        reader.verify(1)
        assert values_of(reader.restore(state_of(0))) == {1}
        assert "nobody here" in failure_of(lambda: reader.save(state_of(2), 2))
    with reader:
        reader.save(state_of(2), 2)
    assert reader.steps() == (1, 2)


def test_an_error_is_an_ordinary_exception():
    """DCP: CheckpointException is a BaseException, which `except Exception` does not catch."""
    assert issubclass(CheckpointError, Exception)
    assert vf.CheckpointError is CheckpointError


def test_each_of_two_saves_at_once_gets_its_own_result(tmp_path):
    """new B: of two at once, the good one raised and the failed one was reported as good, in 3 of 10."""
    parts = {"a": TensorDict({"a": section(1, 1 << 19)}), "b": TensorDict({"b": section(2)})}
    state = TensorDict({**parts["a"], **parts["b"]})
    with async_checkpointer(state, tmp_path, slots={name: [name] for name in parts}) as ckpt:
        for trial in range(10):
            with largest_file(MIB):
                order = ["a", "b"] if trial % 2 else ["b", "a"]
                saves = {
                    name: ckpt.save(parts[name], 2 * trial + (name == "b"), block=trial % 4 < 2)
                    for name in order
                }
                until(lambda saves=saves: all(save.done for save in saves.values()))
            assert f"step {2 * trial} of" in failure_of(saves["a"].result)
            assert saves["b"].result() == tmp_path / f"step_{2 * trial + 1}"
    assert ckpt.steps() == (*range(1, 20, 2),)


def test_a_save_whose_commit_failed_is_no_step_and_lower_ones_can_be_saved(tmp_path):
    """maxtext #5260: the step stayed in a cache; `latest_step` gave it, and lower ones were refused."""
    with slow(big(0), tmp_path) as ckpt:
        ckpt.save(state_of(1), 1).result()
        save = ckpt.save(big(9), 9)
        until(lambda: [*tmp_path.glob(".unfinished-step_9-*/model")])
        (unfinished,) = tmp_path.glob(".unfinished-step_9-*")
        (unfinished / "manifest.json").mkdir()  # in the way of the very last file
        text = failure_of(save.result)
        assert "Is a directory" in text and "manifest.json" in text
        assert save.progress[0] == save.progress[1]  # all had been written
        assert (ckpt.latest(), ckpt.steps()) == (1, (1,))
        ckpt.save(state_of(5), 5).result()
        ckpt.save(state_of(9), 9).result()
    assert ckpt.steps() == (1, 5, 9)
    assert names_in(tmp_path) == ["step_1", "step_5", "step_9"]


def new_writers(before) -> set[int]:
    """The processes that this one has started since, and that live."""

    def found():
        now = {*children()} - {*before}
        return {pid for pid in now if b"writer.py" in Path(f"/proc/{pid}/cmdline").read_bytes()}

    until(found)  # a process that has just started has no name yet
    return found()


def test_a_writer_that_is_killed_while_it_writes_fails_one_save(tmp_path):
    """DCP: after the daemon process died, every later save was a BrokenPipeError."""
    gc.collect()
    before = children()
    with slow(big(0), tmp_path, seconds=2) as ckpt:
        (writer,) = new_writers(before)
        save = ckpt.save(big(1), 1)
        until(lambda: [*tmp_path.glob(".unfinished-step_1-*/model/*.distcp")])
        os.kill(writer, signal.SIGKILL)
        text = failure_of(save.result)
        assert "rank 0" in text and "the writer process was killed by SIGKILL" in text
        assert names_in(tmp_path) == []
        ckpt.save(state_of(2), 2).result()
        ckpt.verify(2)


def test_a_writer_that_cannot_be_started_is_an_error_and_the_next_save_works(tmp_path, monkeypatch):
    """modal training-gym #506: a fork failed, and half a directory was taken for a checkpoint."""
    gc.collect()
    before = children()
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        (writer,) = new_writers(before)
        os.kill(writer, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{writer}/cmdline").read_bytes())
        monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
        text = failure_of(ckpt.save(state_of(1), 1).result)
        assert "rank 0" in text and "no-python" in text
        with pytest.raises((OSError, CheckpointError), match="no-python"):
            async_checkpointer(state_of(0), tmp_path / "other")
        monkeypatch.undo()
        assert (ckpt.latest(), names_in(tmp_path)) == (None, ["other"])
        ckpt.save(state_of(1), 1).result()
        ckpt.verify(1)


@contextlib.contextmanager
def all_busy(pool, num_threads=32):
    """While the block runs, the threads of the pool have something else to do."""
    go_on = threading.Event()
    for _ in range(num_threads):
        pool.submit(go_on.wait, 20)
    try:
        yield
    finally:
        go_on.set()


def test_a_state_changed_before_it_is_copied_fails_at_wait_staged_and_at_result(tmp_path):
    """new E: staging was reported as done though it had failed; DCP: and what was new was written."""
    state = big(1)
    with async_checkpointer(state, tmp_path) as ckpt:
        with all_busy(ckpt._threads):
            save = ckpt.save(state, 1, block=False)
            state["model", "layers.1"].fill_(2)  # too early: nothing is copied yet
        for wait in (save.wait_staged, save.result):
            text = failure_of(wait)
            assert "layers.1" in text and "wait_staged" in text
        assert ckpt.latest() is None
        state["model", "layers.1"].fill_(1)
        ckpt.save(state, 1, block=False).wait_staged()
        state["model", "layers.1"].fill_(2)
    assert values_of(ckpt.restore(state)) == {1}


def test_values_changed_before_tensors_are_copied_are_saved_as_they_were(tmp_path):
    """DCP: Python objects are copied when the save is called, also if the tensors are not."""
    history = {"losses": [1.0]}
    state = big(1, history=NonTensorData(history))
    with async_checkpointer(state, tmp_path) as ckpt:
        with all_busy(ckpt._threads):
            save = ckpt.save(state, 1, block=False)
            history["losses"].append(2.0)
            history["more"] = None
        save.result()
    assert ckpt.restore(state)["history"] == {"losses": [1.0]}


# ---- several saves, and which steps there are


def test_a_save_is_complete_no_sooner_than_it_says(tmp_path):
    """Statement 2: neither the return of a save nor a directory means that it is complete."""
    with slow(big(0), tmp_path) as ckpt:
        save = ckpt.save(big(1), 1)
        until(lambda: names_in(tmp_path))
        assert not save.done
        assert (ckpt.latest(), ckpt.steps()) == (None, ())
        with pytest.raises(TimeoutError):
            save.result(timeout=0.01)
        assert ckpt.restore(big(0))["step"] == 1  # statement 12: it waits
        assert save.done


def test_one_save_of_a_slot_is_pending_at_most(tmp_path):
    """Statement 6."""
    with slow(big(0), tmp_path, 0.3) as ckpt:
        saves = [ckpt.save(big(step), step) for step in range(3)]
        assert [save.done for save in saves] == [True, True, False]
    assert ckpt.steps() == (0, 1, 2)


def test_a_save_waits_for_those_of_its_slot_only(tmp_path):
    """Statements 5 and 7: weights and optimizer can be pending together."""
    parts = {name: TensorDict({name: section(1, NUMEL)}) for name in ("model", "optimizer")}
    state = TensorDict({**parts["model"], **parts["optimizer"]})
    with slow(state, tmp_path, 1.0) as ckpt:
        first, second = ckpt.save(parts["model"], 1), ckpt.save(parts["optimizer"], 2)
        assert not first.done and not second.done
        third = ckpt.save(parts["model"], 3)
        assert first.done and not third.done
    assert ckpt.steps() == (1, 2, 3)
    assert json.loads((tmp_path / "step_2" / "manifest.json").read_text())["slots"] == ["optimizer"]


def test_of_a_double_buffer_each_half_is_used_again_only_when_it_is_written(tmp_path):
    """new C: a second save overwrote the buffers of the first, which held values {1.0, 2.0}."""
    state = big(0)
    with slow(state, tmp_path, 0.3, double_buffer=True) as ckpt:
        saves = []
        for step in range(5):
            for tensor in state["model"].values():
                tensor.fill_(step)
            saves.append(ckpt.save(state, step))
            assert [save.done for save in saves[:-2]] == [True] * (step - 1)
            assert not saves[-1].done
    for step in range(5):
        assert values_of(ckpt.restore(state, step)) == {step}


def test_wait_drains_every_slot_then_raises_and_then_nothing_is_pending(tmp_path):
    """Statement 10."""
    parts = {"a": TensorDict({"a": section(1, 1 << 19)}), "b": TensorDict({"b": section(2, NUMEL)})}
    state = TensorDict({**parts["a"], **parts["b"]})
    slots = {name: [name] for name in parts}
    with async_checkpointer(state, tmp_path, slots=slots, bytes_per_second=2 * MIB) as ckpt:
        ckpt.wait()  # nothing is pending
        with largest_file(MIB + MIB // 2):
            saves = [ckpt.save(parts["a"], 1), ckpt.save(parts["b"], 2)]
            assert "step 1" in failure_of(ckpt.wait)
            assert [save.done for save in saves] == [True, True]
        ckpt.wait()
        assert ckpt.steps() == (2,)
        ckpt.save(parts["a"], 1)  # statement 13: what failed does not count as saved
    assert ckpt.steps() == (1, 2)


def test_retention_counts_complete_steps_only_and_touches_nothing_else(tmp_path):
    """torchtitan #4197: with two half-written newest ones, keep_latest_k=2 deleted the only good one."""
    with slow(big(0), tmp_path, 0.3, keep_last=2) as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step).result()
        for name in ("step_8", "step_9", "step_10.bak", "step-10-backup", "notes"):
            (tmp_path / name).mkdir()
        shutil.copy(tmp_path / "step_2" / "manifest.json", tmp_path / "step_9")
        ckpt.save(state_of(3), 3).result()
        pending = ckpt.save(big(4), 4)  # under way: it does not count either
        assert ckpt.steps() == (2, 3)
        pending.result()
        assert ckpt.steps() == (3, 4)
    assert {"step_8", "step_9", "step_10.bak", "step-10-backup", "notes"} < {*names_in(tmp_path)}


def test_what_a_save_left_unfinished_is_not_taken_for_a_step(tmp_path):
    """flax #1200: what was written before the rename was picked as the latest."""
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        for step in (9, 10):
            ckpt.save(state_of(step), step)
    for name in ("step_11.tmp-x", ".unfinished-step_12-abc"):
        shutil.copytree(tmp_path / "step_10", tmp_path / name)
    assert (ckpt.latest(), ckpt.steps()) == (10, (9, 10))
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        assert values_of(ckpt.restore(state_of(0))) == {10}


@pytest.mark.parametrize("garbage", ["", "{}", "not JSON", "[]", '{"step": 2}'])
def test_a_newer_step_without_a_good_manifest_hides_no_older_one(garbage, tmp_path):
    """Statements 23, 24 and 31."""
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        assert ckpt.latest() is None
        (tmp_path / "step_7").mkdir()
        with pytest.warns(RuntimeWarning, match=r"step 7 is skipped: .*was not finished"):
            assert ckpt.latest() is None
        ckpt.save(state_of(1), 1)
        path = ckpt.save(state_of(2), 2).result()
        (tmp_path / "step_7").rmdir()
    (path / "manifest.json").write_text(garbage)
    with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
        assert ckpt.latest() == 1
    with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
        assert values_of(ckpt.restore(state_of(0))) == {1}


def test_a_step_without_a_model_is_complete(tmp_path):
    """Statement 25: some steps carry no model; also one without any tensor is complete."""
    only_values = TensorDict({"loader": TensorDict({"position": NonTensorData(5)})})
    for step, state in enumerate((TensorDict({"embeddings": section(3)}), only_values)):
        with async_checkpointer(state, tmp_path) as ckpt:
            ckpt.save(state, step)
        assert ckpt.latest() == step
        ckpt.verify(step)
    assert ckpt.restore(only_values)["loader", "position"] == 5


def test_the_step_of_the_manifest_is_the_one_that_was_saved(tmp_path):
    """VeOmni #798: a resumed run counted a step that never ran."""
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        path = ckpt.save(state_of(3), 3).result()
    assert json.loads((path / "manifest.json").read_text())["step"] == 3
    assert ckpt.restore(state_of(0))["step"] == ckpt.latest() == 3


# ---- where nothing can be renamed, and threads


@pytest.fixture
def memory():
    """A place of fsspec without files of the operating system."""
    yield "memory://reports"
    fsspec.filesystem("memory").rm("/reports", recursive=True)


def test_a_backend_without_file_descriptors_saves_and_restores(memory):
    """pytorch #144752: the fsspec writer crashed calling os.fsync."""
    with async_checkpointer(big(0), memory) as ckpt:
        assert ckpt.save(big(1), 1).result() == f"{memory}/step_1"
        ckpt.verify(1)
    assert values_of(async_checkpointer(big(0), memory).restore(big(0))) == {1}


def test_any_thread_saves(tmp_path):
    """orbax #3406: where signals cannot be handled, as outside of the main thread, every save crashed."""
    failures = []

    def work():
        try:
            with async_checkpointer(state_of(0), tmp_path) as ckpt, warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # that it hears of no signal
                with vf.save_on_signal(ckpt, lambda: state_of(2)) as last_save:
                    ckpt.save(state_of(1), 1)
                    failures.extend([last_save(1)] if last_save(1) else [])
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert async_checkpointer(state_of(0), tmp_path).steps() == (1,)


# ---- processes that end, or are killed, while a save is pending


def fill(directory: Path, value: float, **options):
    """A checkpointer with a good step 1 of `value`, and whose next save takes a while."""
    ckpt = slow(big(0), directory, 0.3, **options)
    ckpt.save(big(value), 1).result()
    return ckpt


def life_exits_right_after_a_save(directory):
    ckpt = fill(directory, 1)
    ckpt.save(big(2), 2)
    sys.exit()


def life_exits_after_two_saves_at_once(directory):
    parts = {name: TensorDict({name: section(1, NUMEL)}) for name in ("model", "optimizer", "rest")}
    state = TensorDict({name: part[name] for name, part in parts.items()})
    ckpt = slow(state, directory, 1.0)
    for step, part in enumerate(parts.values()):
        ckpt.save(part, step)


def life_exits_after_a_save_without_copies(directory):
    ckpt = fill(directory, 1, copy=False)
    ckpt.save(big(2), 2)


def life_fails_and_never_waits(directory):
    ckpt = fill(directory, 1)
    _limit_files()
    ckpt.save(big(2), 2)


def life_fails_inside_with(directory):
    with fill(directory, 1) as ckpt:
        _limit_files()
        ckpt.save(big(2), 2)


def life_is_killed_between_a_save_and_its_commit(directory):
    ckpt = fill(directory, 1, keep_last=1)
    ckpt.save(big(2), 2)
    until(lambda: [*directory.glob(".unfinished-step_2-*/model/*.distcp")])
    os.kill(os.getpid(), signal.SIGKILL)


def life_is_killed_while_it_saves_a_step_again(directory):
    ckpt = fill(directory, 1)
    ckpt.save(big(2), 1, overwrite=True)
    until(lambda: [*directory.glob(".unfinished-step_1-*/model/*.distcp")])
    os.kill(os.getpid(), signal.SIGKILL)


def life_is_killed_in_its_first_save(directory):
    ckpt = slow(big(0), directory, 0.5)
    ckpt.save(big(1), 1)
    until(lambda: [*directory.glob(".unfinished-step_1-*/model/*.distcp")])
    os.kill(os.getpid(), signal.SIGKILL)


def _limit_files():
    for process in (os.getpid(), *children()):
        resource.prlimit(process, resource.RLIMIT_FSIZE, (MIB, MIB))


LIVES = {name[5:]: life for name, life in list(globals().items()) if name.startswith("life_")}


def run_lives(directory: Path) -> None:
    """Each in a fork of this process, which ends as a script does: its exit code goes to a file."""
    gc.freeze()  # what is imported is not looked through again at each end
    pids = {}
    for name, life in LIVES.items():
        pid = os.fork()
        if not pid:
            os.dup2(os.open(directory / f"{name}.log", os.O_WRONLY | os.O_CREAT), 2)
            life(directory / name)
            return
        pids[pid] = directory / f"{name}.code"
    while pids:
        pid, status = os.wait()
        pids.pop(pid).write_text(str(os.waitstatus_to_exitcode(status)))


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Tells of a life how it ended: exit code, standard error, and a checkpointer of what it left."""
    directory = tmp_path_factory.mktemp("lives")
    environment = {**os.environ, "PYTHONPATH": str(FILES.parent)}
    subprocess.run([sys.executable, "-W", "error", __file__, str(directory)], env=environment, check=True)

    def how(life):
        name = life.__name__[5:]
        code, log = (directory / f"{name}.{end}" for end in ("code", "log"))
        ckpt = async_checkpointer(state_of(0), directory / name)
        assert [n for n in names_in(directory / name) if not n.startswith("step_")] == []
        return int(code.read_text()), log.read_text(), ckpt

    return how


@pytest.mark.parametrize("life", [life_exits_right_after_a_save, life_exits_after_a_save_without_copies])
def test_a_process_that_ends_right_after_a_save_has_saved(life, ended):
    """verl #7952: the next process started from scratch. DCP: here the write completes, too."""
    code, log, ckpt = ended(life)
    assert (code, log) == (0, "")
    assert ckpt.latest() == 2
    ckpt.verify(2)
    assert values_of(ckpt.restore(big(0))) == {2}


def test_a_process_that_ends_right_after_several_saves_has_saved_all(ended):
    """verl #7952, with slots that are written side by side."""
    code, log, ckpt = ended(life_exits_after_two_saves_at_once)
    assert (code, log, ckpt.steps()) == (0, "", (0, 1, 2))
    for step in ckpt.steps():
        ckpt.verify(step)


def test_a_failure_that_nobody_waits_for_is_on_standard_error(ended):
    """VeOmni #1162, DCP: the run ended with code 0 and nothing was said."""
    _, log, ckpt = ended(life_fails_and_never_waits)
    assert "step 2 of" in log and "was not saved" in log and "File too large" in log
    assert ckpt.steps() == (1,)


def test_a_failure_inside_with_ends_the_process_with_an_error(ended):
    """VeOmni #1162: a failed save at the end of training, exit code 0."""
    code, log, ckpt = ended(life_fails_inside_with)
    assert code == 1
    assert "CheckpointError: step 2 of" in log.splitlines()[-1]
    assert ckpt.steps() == (1,)


def test_killed_between_a_save_and_its_commit_the_previous_step_is_the_latest(ended):
    """KempnerForge #102: the link to the latest, and the clean-up, came before the data was durable."""
    code, _, ckpt = ended(life_is_killed_between_a_save_and_its_commit)
    assert code == -signal.SIGKILL
    assert ckpt.steps() == (1,)
    ckpt.verify(1)
    assert values_of(ckpt.restore(big(0))) == {1}


def test_killed_while_it_saves_a_step_again_the_old_one_is_whole(ended):
    """VeOmni #1181, DCP, statement 30: what was half new passed for the old step, by its marker."""
    code, _, ckpt = ended(life_is_killed_while_it_saves_a_step_again)
    assert code == -signal.SIGKILL
    assert ckpt.steps() == (1,)
    ckpt.verify(1)
    assert values_of(ckpt.restore(big(0))) == {1}


def test_killed_in_its_first_save_there_is_no_step(ended):
    """DCP: one without .metadata is not loadable. Statement 31: none is found."""
    code, _, ckpt = ended(life_is_killed_in_its_first_save)
    assert code == -signal.SIGKILL
    assert (ckpt.latest(), ckpt.steps()) == (None, ())
    assert "no complete step" in failure_of(lambda: ckpt.restore(state_of(0)))


if __name__ == "__main__":
    run_lives(Path(sys.argv[1]))
