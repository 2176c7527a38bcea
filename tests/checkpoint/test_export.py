"""A section of a saved step as a safetensors file."""

import os
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tensordict import NonTensorData, TensorDict

from veofunc.checkpoint import CheckpointError, async_checkpointer
from veofunc.checkpoint.export import to_safetensors


def state_of(step: int, **more) -> TensorDict:
    weight = torch.arange(12.0).view(3, 4) + step
    model = {
        "w": weight,
        "tied": weight,
        "half": weight.bfloat16(),
        "scalar": torch.tensor(step),
        "none": weight[:0],
    }
    return TensorDict({"model": model, "step": NonTensorData(step), **more})


def save(directory, state, *steps: int, **options) -> None:
    with async_checkpointer(state, directory, **options) as ckpt:
        for step in steps:
            ckpt.save(state, step)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == x.dtype and torch.equal(found[name], x) for name, x in expected.items()
    )


def test_all_tensors_of_the_model_come_by_their_names(tmp_path):
    state = state_of(7)
    save(tmp_path / "steps", state, 7)
    returned = to_safetensors(tmp_path / "steps", tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert same(found, dict(state["model"].items()))
    assert same(returned, found)
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors", "steps"]
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "7"}


def test_any_section_and_what_ranks_have_of_their_own(tmp_path):
    own, ema = torch.ones(2), torch.zeros(3)
    state = state_of(1, loader=TensorDict({"at": own, "epoch": NonTensorData(1)}), ema=TensorDict({"w": ema}))
    save(tmp_path / "steps", state, 1)
    to_safetensors(tmp_path / "steps", tmp_path / "own", section="loader")
    assert same(load_file(tmp_path / "own"), {"rank_0.at": own})
    to_safetensors(tmp_path / "steps", tmp_path / "ema", section="ema")
    assert same(load_file(tmp_path / "ema"), {"w": ema})


def test_the_newest_complete_step_is_taken_unless_one_is_named(tmp_path):
    save(tmp_path / "steps", state_of(1), 1)
    save(tmp_path / "steps", state_of(2), 2)
    (tmp_path / "steps" / "step_3").mkdir()
    with pytest.warns(RuntimeWarning, match=r"step 3 is skipped: .*manifest\.json") as caught:
        assert to_safetensors(tmp_path / "steps", tmp_path / "a")["scalar"] == 2
    assert caught[0].filename == __file__
    assert to_safetensors(tmp_path / "steps", tmp_path / "b", step=1)["scalar"] == 1


def test_a_url_may_hold_the_steps(tmp_path):
    save("memory://export/steps", state_of(1), 1)
    assert to_safetensors("memory://export/steps", tmp_path / "a")["scalar"] == 1


def test_a_file_is_only_replaced_by_force_and_not_by_what_fails(tmp_path):
    save(tmp_path / "steps", state_of(1), 1)
    file = tmp_path / "a"
    file.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="exists; take another name, or replace it with force=True"):
        to_safetensors(tmp_path / "steps", file)
    with pytest.raises(
        ValueError, match=r"section must be one of \['model'\], which step 1 has, got 'optimizer'"
    ):
        to_safetensors(tmp_path / "steps", file, section="optimizer", force=True)
    assert file.read_bytes() == b"mine"
    to_safetensors(tmp_path / "steps", file, force=True)
    assert load_file(file)["scalar"] == 1


def test_damage_is_named_and_nothing_written(tmp_path):
    save(tmp_path / "steps", state_of(1), 1)
    (broken,) = (tmp_path / "steps" / "step_1" / "model").glob("*.distcp")
    content = bytearray(broken.read_bytes())
    content[-1] ^= 1
    broken.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.distcp: its CRC-32 is"):
        to_safetensors(tmp_path / "steps", tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("step", "kind"), [(2, CheckpointError), (-1, ValueError), (True, TypeError)])
def test_a_step_that_is_not_there_is_refused(step, kind, tmp_path):
    save(tmp_path / "steps", state_of(1), 1)
    with pytest.raises(kind):
        to_safetensors(tmp_path / "steps", tmp_path / "a", step=step)


def test_an_empty_directory_has_no_complete_step(tmp_path):
    with pytest.raises(CheckpointError, match="there is no complete step"):
        to_safetensors(tmp_path, tmp_path / "a")


def test_a_dtype_that_the_format_lacks_is_named(tmp_path):
    state = TensorDict({"model": {"x": torch.ones(2, dtype=torch.complex128), "y": torch.ones(2)}})
    save(tmp_path / "steps", state, 1)
    with pytest.raises(ValueError, match=r"no dtype torch\.complex128, which these have: \['x'\]"):
        to_safetensors(tmp_path / "steps", tmp_path / "a")
    assert os.listdir(tmp_path) == ["steps"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    save(tmp_path / "steps", state_of(1), 1)
    with pytest.raises(OSError, match=r"nowhere/a cannot be written: .*No such file"):
        to_safetensors(tmp_path / "steps", tmp_path / "nowhere" / "a")


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'veofunc\[export\]'"):
        to_safetensors(tmp_path, tmp_path / "a")
