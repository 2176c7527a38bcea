"""The figure that `router_heatmap` draws: its numbers, labels and shape."""

import math

import pytest
import torch
from matplotlib.figure import Figure
from tensordict import TensorDict

import veofunc as vf
from tests import reference


def draw(loads, **options):
    """The figure of layers with the given loads of their own experts, as drawn at the end of a run."""
    width = max(map(len, loads))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in loads])
    obs = TensorDict({"router": {"tokens_per_expert": padded}})
    routers = tuple((f"layers.{i}.router", len(row), 2) for i, row in enumerate(loads))
    return vf.router_heatmap(obs, routers, **options)


def pixels(figure):
    """The drawn numbers, [L][E]; NaN where nothing is."""
    (image,) = figure.axes[0].get_images()
    return image.get_array().filled(math.nan).tolist()


def rendered(figure, tmp_path):
    path = tmp_path / "load.png"
    figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    return figure


def test_shows_load_over_mean_load(tmp_path):
    loads = [[14, 2, 0, 0], [4, 4, 4, 4]]
    figure = rendered(draw(loads), tmp_path)
    assert isinstance(figure, Figure)
    expected = [[violation + 1 for violation in reference.violations(row)] for row in loads]
    assert pixels(figure) == [pytest.approx(row) for row in expected]


def test_experts_that_a_layer_does_not_have_and_layers_without_tokens_are_missing(tmp_path):
    figure = rendered(draw([[3, 1], [0, 0, 0], [1, 1, 1]]), tmp_path)
    nan = math.nan
    assert pixels(figure) == [
        pytest.approx(row, nan_ok=True) for row in ([1.5, 0.5, nan], [nan, nan, nan], [1.0, 1.0, 1.0])
    ]


def test_without_any_token_the_picture_is_empty_and_draws(tmp_path):
    figure = rendered(draw([[0, 0], [0, 0]]), tmp_path)
    assert all(math.isnan(value) for row in pixels(figure) for value in row)


def test_says_what_it_shows_and_of_which_steps(tmp_path):
    axes = rendered(draw([[3, 1]], caption="steps 1-100"), tmp_path).axes
    assert axes[0].get_title() == "Expert load over mean load, steps 1-100"
    assert draw([[3, 1]]).axes[0].get_title() == "Expert load over mean load"
    assert axes[0].get_xlabel() == "expert"
    assert axes[0].get_ylabel() == "layer"
    assert axes[1].get_ylabel() == "load / mean load"


def colour(figure, load):
    """Red, green, blue and opacity of a load in the figure."""
    (image,) = figure.axes[0].get_images()
    return image.cmap(image.norm(load))


@pytest.mark.parametrize("loads", [[[4, 4]], [[1000] + [1] * 99]], ids=["balanced", "collapsed"])
def test_a_load_has_the_same_colour_in_every_figure(loads):
    figure = draw(loads)
    for load, rgba in ((0, (0.02, 0.19, 0.38)), (1, (0.97, 0.97, 0.97)), (3, (0.40, 0.0, 0.12))):
        assert colour(figure, load)[:3] == pytest.approx(rgba, abs=0.01)
    assert colour(figure, 50) == colour(figure, 3)


@pytest.mark.parametrize(("num_layers", "num_experts"), [(1, 2), (2, 8), (60, 128), (94, 512)])
def test_one_cell_per_layer_and_expert_with_whole_numbers_as_ticks(num_layers, num_experts, tmp_path):
    generator = torch.Generator().manual_seed(0)
    loads = torch.randint(1, 99, (num_layers, num_experts), generator=generator).tolist()
    figure = rendered(draw(loads), tmp_path)
    axes = figure.axes[0]
    (image,) = axes.get_images()
    assert image.get_array().shape == (num_layers, num_experts)
    assert axes.get_xlim() == (-0.5, num_experts - 0.5)
    assert axes.get_ylim() == (num_layers - 0.5, -0.5)  # the first layer on top
    for axis, length in ((axes.xaxis, num_experts), (axes.yaxis, num_layers)):
        low, high = sorted(axis.get_view_interval())
        ticks = [tick for tick in axis.get_ticklocs() if low <= tick <= high]
        assert ticks and all(tick == int(tick) for tick in ticks)
        assert ticks[0] == 0 and len(ticks) <= 24 and ticks[-1] <= length - 1
    assert max(figure.get_size_inches()) <= 14


def test_belongs_to_no_window_system():
    import matplotlib.pyplot as plt

    draw([[3, 1]])
    assert plt.get_fignums() == []


def test_reading_changes_nothing():
    obs = TensorDict({"router": {"tokens_per_expert": torch.tensor([[3, 1]])}})
    vf.router_heatmap(obs, (("gate", 2, 1),))
    assert obs["router", "tokens_per_expert"].tolist() == [[3, 1]]


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        (vf.Window().obs, "the sums of 1 routers, it has no sums, as an empty window"),
        (TensorDict({"channel": torch.ones(1)}), "obs has no 'router', only .*monitor_router"),
        (TensorDict({"router": {"tokens_per_expert": torch.ones(2, 2)}}), "of 1 routers, it has 2 routers"),
    ],
    ids=["empty window", "channels", "two routers"],
)
def test_sums_of_something_else_are_refused(obs, message):
    with pytest.raises(ValueError, match=message):
        vf.router_heatmap(obs, (("gate", 2, 1),))
