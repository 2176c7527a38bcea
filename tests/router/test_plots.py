"""The figure that `router_plot` draws: its lines, colours and axis."""

import math

import pytest
import torch
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

import veofunc as vf

NAN, INF = math.nan, math.inf


def step(*layers, floor=None):
    """Metrics with the given max violation of each layer, None for a layer without tokens."""
    seen = [layer for layer in layers if layer is not None and math.isfinite(layer)]
    metrics = {"loss": 9.0, "moe/avg_vio/layer_7": 0.5, "moe/batch_max_vio/layer_8": 0.5}
    metrics |= {f"moe/max_vio/layer_{i}": layer for i, layer in enumerate(layers) if layer is not None}
    if seen:
        metrics |= {"moe/max_vio/max": max(seen), "moe/max_vio/mean": sum(seen) / len(seen)}
    return metrics | ({} if floor is None else {"moe/random_max_vio/mean": floor})


def lines(figure):
    """The drawn points by label, None where there is a gap."""
    return {
        line.get_label(): [(x, None if math.isnan(y) else y) for x, y in line.get_xydata().tolist()]
        for line in figure.axes[0].get_lines()
    }


def legend(figure):
    (drawn,) = figure.legends
    return [text.get_text() for text in drawn.get_texts()]


def ticks(axis):
    low, high = sorted(axis.get_view_interval())
    return [tick for tick in axis.get_ticklocs().tolist() if low <= tick <= high]


def rendered(figure, tmp_path):
    path = tmp_path / "violation.png"
    figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    return figure


def test_draws_each_layer_the_worst_the_mean_and_the_noise_floor(tmp_path):
    history = [(10, step(1.0, 3.0, floor=0.2)), (20, step(0.5, 0.1, floor=0.1))]
    figure = rendered(vf.router_plot(history), tmp_path)
    assert isinstance(figure, Figure)
    assert lines(figure) == {
        "layer 0": [(10, 1.0), (20, 0.5)],
        "layer 1": [(10, 3.0), (20, 0.1)],
        "worst layer": [(10, 3.0), (20, 0.5)],
        "mean over layers": [(10, 2.0), (20, 0.3)],
        "random routing": [(10, 0.2), (20, 0.1)],
    }
    assert legend(figure) == ["worst layer", "mean over layers", "random routing"]
    assert {line.get_marker() for line in figure.legends[0].get_lines()} == {""}
    dashed = [line.get_label() for line in figure.axes[0].get_lines() if line.get_linestyle() == "--"]
    assert dashed == ["random routing"]


def test_draws_what_router_metrics_returns(tmp_path):
    sums = {"tokens_per_expert": torch.tensor([[14, 2, 0, 0], [4, 4, 4, 4]]), "dropped": torch.tensor([0, 0])}
    metrics = vf.router_metrics({"router": sums}, (("a", 4, 2), ("b", 4, 2)))
    drawn = lines(rendered(vf.router_plot([(1, metrics), (2, metrics)]), tmp_path))
    assert drawn["layer 0"] == drawn["worst layer"] == [(1, 2.5), (2, 2.5)]
    assert drawn["layer 1"] == [(1, 0.0), (2, 0.0)]
    assert drawn["random routing"][0][1] == pytest.approx(0.41, abs=0.01)


def test_where_the_noise_floor_is_not_known_it_is_not_drawn():
    assert legend(vf.router_plot([(1, step(1.0)), (2, step(2.0))])) == ["worst layer", "mean over layers"]


def test_gaps_where_a_layer_has_no_tokens_or_no_finite_value_and_lone_points_are_marked(tmp_path):
    history = [(1, step(1.0, 2.0)), (2, step(1.0, None)), (3, step(1.0, 3.0)), (4, step(1.0, NAN)), (5, {})]
    history += [(6, step(1.0, INF) | {"moe/max_vio/max": None}), (7, step(1.0, 2.0)), (8, step(1.0, 2.0))]
    figure = rendered(vf.router_plot(history), tmp_path)
    drawn = lines(figure)
    assert [y for _, y in drawn["layer 1"]] == [2.0, None, 3.0, None, None, None, 2.0, 2.0]
    assert [y for _, y in drawn["worst layer"]] == [2.0, 1.0, 3.0, 1.0, None, None, 2.0, 2.0]
    marked = {
        line.get_label(): [i for i in line.get_markevery() if not math.isnan(line.get_ydata()[i])]
        for line in figure.axes[0].get_lines()
    }
    assert marked["layer 1"] == [0, 2]
    assert marked["layer 0"] == []


def test_steps_are_put_in_order_and_the_last_of_a_step_counts():
    history = [(20, step(1.0)), (10, step(3.0)), (20, step(2.0))]
    assert lines(vf.router_plot(iter(history)))["layer 0"] == [(10, 3.0), (20, 2.0)]


def test_layers_are_coloured_by_depth_as_the_bar_says(tmp_path):
    figure = rendered(vf.router_plot([(k, step(*[1.0 + i for i in range(60)])) for k in (1, 2)]), tmp_path)
    colors = [to_rgb(line.get_color()) for line in figure.axes[0].get_lines()[:60]]
    lightness = [0.299 * red + 0.587 * green + 0.114 * blue for red, green, blue in colors]
    assert lightness == sorted(lightness) and lightness[-1] < 0.8  # seen on white
    bar = figure.axes[1]
    assert bar.get_ylabel() == "layer" and bar.get_ylim() == (59.5, -0.5)
    (mesh,) = (drawn for drawn in bar.collections if isinstance(drawn, QuadMesh))
    assert [to_rgb(mesh.cmap(mesh.norm(i))) for i in range(60)] == [pytest.approx(color) for color in colors]
    shown = ticks(bar.yaxis)
    assert shown[0] == 0 and shown[-1] <= 59 and 5 <= len(shown) <= 12


@pytest.mark.parametrize(
    "values",
    [(0.0,), (0.52, 0.58), (0.003, 0.004), (0.0, 127.0), (0.03, 24.0), (5.0,), (1e-9,)],
    ids=str,
)
def test_the_axis_has_numbers_and_shows_all_values(values, tmp_path):
    figure = rendered(vf.router_plot([(k, step(*values)) for k in (10, 20, 30)]), tmp_path)
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    assert 0 <= low <= min(values) and max(values) <= high
    assert 2 <= len(ticks(axes.yaxis)) <= 16
    assert all(tick == int(tick) for tick in ticks(axes.xaxis))
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert all(float(label) == pytest.approx(y) for label, y in zip(labels, axes.get_yticks(), strict=True))


def test_a_history_of_one_step_shows_points(tmp_path):
    figure = rendered(vf.router_plot([(7, step(0.5, 1.5, floor=0.1))]), tmp_path)
    assert [line.get_markevery() for line in figure.axes[0].get_lines()] == [[0]] * 5


def test_without_a_finite_value_the_picture_is_empty_and_draws(tmp_path):
    figure = rendered(vf.router_plot([(1, {"moe/max_vio/layer_0": NAN})]), tmp_path)
    assert lines(figure) == {} and legend(figure) == []


def test_a_thousand_steps_of_a_large_model_draw(tmp_path):
    many = [(k, step(*[1.0 + (k * i) % 7 for i in range(60)], floor=0.1)) for k in range(1000)]
    assert len(lines(rendered(vf.router_plot(many), tmp_path))) == 63


def test_belongs_to_no_window_system():
    import matplotlib.pyplot as plt

    vf.router_plot([(1, step(1.0))])
    assert plt.get_fignums() == []


def test_a_history_without_violations_is_refused():
    for empty in ([], iter(())):
        with pytest.raises(ValueError, match="history is empty, it must have a step with metrics"):
            vf.router_plot(empty)
    with pytest.raises(ValueError, match=r"metrics like 'moe/max_vio/layer_0', it has loss, moe/max_vio/max"):
        vf.router_plot([(1, {"loss": 1.0, "moe/max_vio/max": 1.0})])
    with pytest.raises(ValueError, match="it has none"):
        vf.router_plot([(1, {})])
