"""Sums over steps and ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tensordict import TensorDict

import veofunc as vf


def obs(count: int, loss: float = 0.5) -> TensorDict:
    return TensorDict({"channel": {"count": torch.tensor([count, 1]), "loss": torch.tensor(loss)}})


class TestWindow:
    def test_adds_up(self):
        window = vf.Window().add(obs(2), 1).add(obs(3), 2).add(obs(4), 3)
        assert window.obs["channel", "count"].tolist() == [9, 3]
        assert window.obs["channel", "loss"].item() == 1.5
        assert (window.first_step, window.last_step, window.num_steps) == (1, 3, 3)
        assert repr(window) == "Window(steps 1-3)"

    def test_is_frozen_and_leaves_its_arguments_alone(self):
        first = obs(2)
        window = vf.Window().add(first, 1)
        longer = window.add(obs(3), 2)
        first["channel", "count"].zero_()
        assert window.obs["channel", "count"].tolist() == [2, 1]
        assert longer.obs["channel", "count"].tolist() == [5, 2]
        with pytest.raises(dataclasses.FrozenInstanceError):
            window.last_step = 5

    def test_micro_batches_of_one_step_count_as_one_step(self):
        window = vf.Window().add(obs(2), 7).add(obs(3), 7).add(obs(4), 8)
        assert (window.first_step, window.last_step, window.num_steps) == (7, 8, 2)
        assert window.obs["channel", "count"].tolist() == [9, 3]

    def test_windows_are_compared_and_hashed_as_objects(self):
        window = vf.Window().add(obs(1), 1)
        assert window == window and window != vf.Window()
        assert len({window, vf.Window(), window}) == 2

    def test_names_that_only_look_alike_are_different(self):
        window = vf.Window().add(TensorDict({"a.b": torch.tensor(1)}), 1)
        with pytest.raises(ValueError, match="obs must have the names"):
            window.add(TensorDict({"a": {"b": torch.tensor(1)}}), 2)

    def test_step_zero_is_a_step(self):
        window = vf.Window().add(obs(1), 0)
        assert not window.empty
        assert repr(window) == "Window(steps 0-0)"

    def test_an_empty_window_says_so_and_has_no_metrics(self):
        window = vf.Window()
        assert window.empty
        assert repr(window) == "Window(empty)"
        assert vf.channel_metrics(window.obs, ("a",)) == {}
        assert vf.router_metrics(window.obs, ()) == {}
        assert window.all_reduce().empty

    def test_empty_windows_do_not_share_their_sums(self):
        assert vf.Window().obs is not vf.Window().obs

    def test_comes_back_from_its_fields(self):
        window = vf.Window().add(obs(2), 1).add(obs(3), 2)
        fields = {field.name: getattr(window, field.name) for field in dataclasses.fields(window)}
        again = vf.Window(**fields).add(obs(4), 3)
        assert again.obs["channel", "count"].tolist() == [9, 3]
        assert again.first_step == 1

    def test_goes_on_where_the_new_sums_are(self):
        window = vf.Window().add(obs(2), 1)
        elsewhere = window.add(obs(3).to("meta"), 2)
        assert elsewhere.obs["channel", "count"].device.type == "meta"
        assert window.obs["channel", "count"].tolist() == [2, 1]

    def test_other_sums_are_an_error(self):
        window = vf.Window().add(obs(2), 1)
        with pytest.raises(ValueError, match=r"(?s)obs must have the names.*window: channel > count \[2\]"):
            window.add(TensorDict({"router": torch.ones(1)}), 2)
        with pytest.raises(ValueError, match="obs must have the names"):
            window.add(TensorDict({"channel": {"count": torch.ones(3), "loss": torch.tensor(1.0)}}), 2)

    def test_a_falling_step_is_an_error(self):
        with pytest.raises(ValueError, match="step must be at least the window's last step 5, got 4"):
            vf.Window().add(obs(1), 5).add(obs(1), 4)

    @pytest.mark.parametrize("step", [1.0, "1", None, True, torch.tensor(1)])
    def test_a_step_must_be_an_int(self, step):
        with pytest.raises(TypeError, match="step must be an int"):
            vf.Window().add(obs(1), step)

    @pytest.mark.parametrize("sums", [None, {"a": torch.tensor(1)}, (torch.tensor(1.0), TensorDict())])
    def test_sums_must_be_a_tensordict(self, sums):
        with pytest.raises(TypeError, match="obs must be a TensorDict of sums"):
            vf.Window().add(sums, 1)


class TestAllReduce:
    def test_a_window_is_not_its_sums(self):
        with pytest.raises(TypeError, match=r"of a window: window\.obs\), got Window"):
            vf.all_reduce(vf.Window())

    def test_without_a_process_group_copies(self):
        given = obs(2)
        total = vf.all_reduce(given)
        assert (total == given).all()
        total["channel", "count"].zero_()
        assert given["channel", "count"].tolist() == [2, 1]
