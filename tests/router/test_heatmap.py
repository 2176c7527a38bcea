"""The figures that `router_heatmap` and `specialisation_heatmap` draw: their numbers, labels and shape."""

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


def draw_channels(by_channel, names=(), others=None, **options):
    """The figure of channels with the given loads, [C][L][E], and of the loads that no channel has."""
    by_channel = torch.tensor(by_channel)
    whole = by_channel.sum(0) + (0 if others is None else torch.tensor(others))
    sums = {"tokens_per_expert": whole, "tokens_per_expert_by_channel": by_channel}
    routers = tuple((f"layers.{i}.router", whole.shape[1], 2) for i in range(len(whole)))
    return vf.specialisation_heatmap(TensorDict({"router": sums}), routers, names, **options)


def shown(figure):
    """The axes with a picture, by the name of their channel."""
    return {axes.get_title().split(",")[0]: axes for axes in figure.axes if axes.get_images()}


def drawn_channel(figure, name):
    """The drawn numbers of a channel, [L][E]; NaN where nothing is, infinite where it has no load."""
    (image,) = shown(figure)[name].get_images()
    drawn = image.get_array().filled(math.nan).tolist()
    return [[-math.inf if value < -50 else value for value in row] for row in drawn]


def preferences(part, whole):
    """Powers of two of share over share, of one layer."""
    result = []
    for a, b in zip(part, whole, strict=True):
        if sum(part) == 0 or b == 0:
            result.append(math.nan)
        elif a == 0:
            result.append(-math.inf)
        else:
            result.append(math.log((a / sum(part)) / (b / sum(whole))) / math.log(2))
    return result


def test_shows_the_share_of_a_channel_over_the_share_of_all(tmp_path):
    code, prose = [[6, 1, 0, 2], [1, 1, 1, 0]], [[0, 3, 3, 2], [0, 0, 0, 0]]
    others = [[1, 0, 0, 4], [0, 0, 1, 0]]
    figure = rendered(draw_channels([code, prose], ("code", "prose"), others), tmp_path)
    whole = [
        [sum(column) for column in zip(*layer, strict=True)]
        for layer in zip(code, prose, others, strict=True)
    ]
    for name, channel in (("code", code), ("prose", prose)):
        expected = [preferences(part, total) for part, total in zip(channel, whole, strict=True)]
        assert drawn_channel(figure, name) == [pytest.approx(row, nan_ok=True) for row in expected]


def test_no_preference_is_white_and_four_times_as_much_the_same_red_in_every_figure():
    figure = draw_channels([[[4, 4]], [[4, 4]]])
    (image,) = shown(figure)["0"].get_images()
    for power, rgba in ((0, (0.97, 0.97, 0.97)), (2, (0.40, 0.0, 0.12)), (-2, (0.02, 0.19, 0.38))):
        assert image.cmap(image.norm(power))[:3] == pytest.approx(rgba, abs=0.01)


def test_an_expert_that_a_channel_leaves_alone_is_dark_blue_not_grey():
    figure = draw_channels([[[4, 0, 0]], [[0, 4, 0]]])
    (image,) = shown(figure)["0"].get_images()
    colours = image.to_rgba(image.get_array())[0].tolist()
    assert colours[1][:3] == pytest.approx((0.02, 0.19, 0.38), abs=0.01)
    assert colours[2][:3] == pytest.approx((0.5, 0.5, 0.5), abs=0.01)


def test_says_of_each_channel_how_much_of_the_load_it_has(tmp_path):
    name = "a_name_that_is_far_too_long_for_a_title"
    figure = draw_channels([[[1, 1]], [[300, 300]], [[99, 99]]], ("a", "b", name), caption="steps 1-100")
    titles = [axes.get_title() for axes in rendered(figure, tmp_path).axes]
    assert titles[:3] == [
        "b, 75 % of the load",
        "a_name_that…_for_a_title, 25 % of the load",
        "a, 0.2 % of the load",
    ]
    assert figure.get_suptitle() == "Expert use by channel, steps 1-100"
    assert draw_channels([[[1, 1]]]).get_suptitle() == "Expert use by channel"
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("expert", "layer")
    bar = figure.axes[-1]
    assert bar.get_ylabel() == "share of the channel / share of all"
    assert [tick.get_text() for tick in bar.get_yticklabels()] == ["0.25", "0.5", "1", "2", "4"]


def test_shows_the_six_channels_with_the_most_load_and_none_without(tmp_path):
    loads = [3, 0, 8, 7, 1, 5, 4, 9]
    figure = rendered(draw_channels([[[load, load]] for load in loads], ("a", "b", "c")), tmp_path)
    assert list(shown(figure)) == ["7", "c", "3", "5", "6", "a"]
    assert list(shown(draw_channels([[[0, 0]], [[1, 0]]]))) == ["1"]


def test_without_any_load_of_a_channel_it_says_so(tmp_path):
    figure = rendered(draw_channels([[[0, 0]], [[0, 0]]], others=[[1, 1]]), tmp_path)
    assert [axes.get_title() for axes in figure.axes] == ["no channel has any load"]


@pytest.mark.parametrize("num_channels", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize(("num_layers", "num_experts"), [(1, 2), (60, 128), (94, 512)])
def test_an_expert_of_a_channel_has_a_pixel_and_columns_have_numbers(
    num_channels, num_layers, num_experts, tmp_path
):
    generator = torch.Generator().manual_seed(0)
    shape = (num_channels, num_layers, num_experts)
    figure = rendered(draw_channels(torch.randint(1, 99, shape, generator=generator).tolist()), tmp_path)
    assert len(shown(figure)) == num_channels
    assert max(figure.get_size_inches()) <= 15
    columns = {}
    for axes in shown(figure).values():
        box = axes.get_window_extent()
        assert box.width >= num_experts and box.height >= num_layers
        columns.setdefault(round(box.x0), []).append(axes)
    for column in columns.values():
        lowest = min(column, key=lambda axes: axes.get_window_extent().y0)
        assert any(label.get_visible() and label.get_text() for label in lowest.get_xticklabels())


@pytest.mark.parametrize(
    ("sums", "names", "message"),
    [
        ({}, (), "obs has no sums by channel: give monitor_router by_channel="),
        (
            {"tokens_per_expert_by_channel": torch.ones(1, 1, 2)},
            ("a", "b"),
            "obs has 1 channels, got 2 names",
        ),
    ],
    ids=["no channels", "too many names"],
)
def test_sums_without_these_channels_are_refused(sums, names, message):
    obs = TensorDict({"router": {"tokens_per_expert": torch.ones(1, 2)} | sums})
    with pytest.raises(ValueError, match=message):
        vf.specialisation_heatmap(obs, (("gate", 2, 1),), names)
    with pytest.raises(ValueError, match="the sums of 2 routers, it has 1 routers"):
        vf.specialisation_heatmap(obs, (("gate", 2, 1),) * 2, names)
    with pytest.raises(ValueError, match="it has no sums, as an empty window"):
        vf.specialisation_heatmap(vf.Window().obs, (("gate", 2, 1),), names)
