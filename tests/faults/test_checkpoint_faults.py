"""What a checkpoint promises when a write fails or a file is damaged. Killed processes: checkpoint.py."""

import logging
import shutil
import time

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from tests.limits import largest_file
from veofunc.checkpoint import CheckpointError, async_checkpointer


def state_of(value: float, numel: int = 16, num_tensors: int = 3) -> TensorDict:
    tensors = {f"layers.{i}": torch.full((numel,), float(value)) for i in range(num_tensors)}
    return TensorDict({"model": TensorDict(tensors), "step": NonTensorData(value)})


def big_state_of(value: float) -> TensorDict:
    return state_of(value, numel=1 << 20)


def values_of(state: TensorDict) -> set[float]:
    return {x for tensor in state["model"].values() for x in tensor.unique().tolist()}


def names_in(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


class TestFailedWrite:
    @pytest.fixture
    def ckpt(self, tmp_path):
        ckpt = async_checkpointer(big_state_of(0), tmp_path)
        ckpt.save(big_state_of(1), 1).result()
        return ckpt

    def fail(self, ckpt, step=2):
        with largest_file(1 << 20):
            save = ckpt.save(big_state_of(step), step)
            while not save.done:
                time.sleep(0.001)
        return save

    def test_raises_at_result_and_names_rank_file_and_cause(self, ckpt, tmp_path):
        save = self.fail(ckpt)
        with pytest.raises(CheckpointError, match=r"step 2 .*rank 0.*step_2.*model") as caught:
            save.result()
        assert "File too large" in str(caught.value)
        ckpt.wait()
        assert ckpt.save(big_state_of(2), 2).result() == tmp_path / "step_2"

    def test_raises_at_wait(self, ckpt):
        self.fail(ckpt)
        with pytest.raises(CheckpointError, match="step 2"):
            ckpt.wait()
        ckpt.save(big_state_of(3), 3)
        ckpt.wait()

    def test_raises_at_the_next_save_which_is_not_made(self, ckpt):
        self.fail(ckpt)
        with pytest.raises(CheckpointError, match="step 2"):
            ckpt.save(big_state_of(3), 3)
        ckpt.save(big_state_of(4), 4).result()
        assert ckpt.steps() == (1, 4)

    def test_raises_on_leaving(self, ckpt):
        with pytest.raises(CheckpointError, match="step 2"), ckpt:
            self.fail(ckpt)

    def test_does_not_hide_the_exception_of_the_block(self, ckpt):
        with pytest.raises(KeyError) as caught, ckpt:
            self.fail(ckpt)
            raise KeyError("mine")
        (note,) = caught.value.__notes__
        assert "step 2" in note

    def test_leaves_no_file_and_earlier_steps_untouched(self, ckpt, tmp_path):
        with pytest.raises(CheckpointError):
            self.fail(ckpt).result()
        assert names_in(tmp_path) == ["step_1"]
        assert values_of(ckpt.restore(big_state_of(0))) == {1}

    def test_is_logged_even_if_nobody_asks(self, ckpt, caplog):
        with caplog.at_level(logging.ERROR):
            self.fail(ckpt)
        assert "step 2" in caplog.text

    def test_raises_if_the_directory_is_gone(self, ckpt, tmp_path):
        tmp_path.rename(aside := tmp_path.with_name("aside"))
        tmp_path.write_text("in the way")
        with pytest.raises(NotADirectoryError, match=f"{tmp_path}"):
            ckpt.save(big_state_of(2), 2)
        tmp_path.unlink()
        aside.rename(tmp_path)
        assert ckpt.save(big_state_of(2), 2).result().name == "step_2"


class TestDamage:
    @pytest.fixture
    def ckpt(self, tmp_path):
        with async_checkpointer(state_of(0), tmp_path) as ckpt:
            ckpt.save(state_of(1), 1)
            ckpt.save(state_of(2), 2)
        return ckpt

    def test_verify_accepts_what_is_whole(self, ckpt):
        ckpt.verify(1)
        ckpt.verify(2)

    @pytest.mark.parametrize("name", ["model/__0_0.distcp", "model/.metadata", "manifest.json"])
    def test_a_flipped_bit_anywhere_is_found_before_anything_is_read(self, ckpt, name, tmp_path):
        file = tmp_path / "step_2" / name
        content = file.read_bytes()
        for index in range(0, len(content), max(1, len(content) // 40)):
            file.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
            with pytest.raises(CheckpointError, match=name):
                ckpt.verify(2)
            with pytest.raises(CheckpointError, match=name):
                ckpt.restore(state_of(0), 2)

    @pytest.mark.parametrize("name", ["model/__0_0.distcp", "model/.metadata", "manifest.json"])
    @pytest.mark.parametrize("damage", ["truncated", "missing"])
    def test_latest_skips_a_step_with_a_damaged_file_and_says_why(self, ckpt, name, damage, tmp_path):
        file = tmp_path / "step_2" / name
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-1])
        with pytest.warns(RuntimeWarning, match=f"step 2 is skipped.*{name}"):
            assert ckpt.latest() == 1
        with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
            assert values_of(ckpt.restore(state_of(0))) == {1}
        assert ckpt.steps() == (1,)
        with pytest.raises(CheckpointError, match=name):
            ckpt.restore(state_of(0), 2)

    def test_a_file_of_another_step_is_found(self, ckpt, tmp_path):
        data = "model/__0_0.distcp"
        shutil.copy(tmp_path / "step_1" / data, tmp_path / "step_2" / data)
        with pytest.raises(CheckpointError, match="CRC-32"):
            ckpt.restore(state_of(0), 2)

    def test_a_step_that_does_not_exist_is_named(self, ckpt, tmp_path):
        with pytest.raises(CheckpointError, match=r"step_7; complete steps: \(1, 2\)"):
            ckpt.restore(state_of(0), 7)
        with pytest.raises(CheckpointError, match="no complete step"):
            async_checkpointer(state_of(0), tmp_path / "none").restore(state_of(0))
