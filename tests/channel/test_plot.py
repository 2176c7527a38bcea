"""The figure that `channel_plot` draws: its lines, areas and legend."""

import math

import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

import veofunc as vf

NAN, INF = math.nan, math.inf


def step(**channels):
    """Metrics of channels with the given (loss, tokens)."""
    metrics = {"loss": 9.0, "moe/max_vio/max": 0.5}
    for name, (loss, tokens) in channels.items():
        metrics[f"channel_loss/{name}"] = loss
        metrics[f"channel_loss_weighted/{name}"] = 7.0
        metrics[f"channel_tokens/{name}"] = tokens
        metrics[f"channel_perplexity/{name}"] = 8.0
    return metrics


def lines(figure):
    """The drawn points by channel, None where there is a gap."""
    return {
        line.get_label(): [(x, None if math.isnan(y) else y) for x, y in line.get_xydata().tolist()]
        for line in figure.axes[0].get_lines()
    }


def edges(figure):
    """Lower and upper edge of each area, as {step: (lower, upper)}, from the bottom up."""
    found = []
    for area in figure.axes[1].collections:
        ys = {}
        for path in area.get_paths():
            for x, y in path.vertices.tolist():
                ys.setdefault(x, []).append(y)
        found.append({x: (min(y), max(y)) for x, y in ys.items()})
    return found


def legend(figure):
    (drawn,) = figure.legends
    return [text.get_text() for text in drawn.get_texts()]


def rendered(figure, tmp_path):
    path = tmp_path / "channels.png"
    figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    return figure


def test_draws_the_loss_of_every_channel_with_gaps_where_it_is_not_known(tmp_path):
    history = [
        (10, step(b=(4.0, 6), a=(2.0, 2))),
        (20, step(a=(1.5, 1))),
        (30, step(a=(None, 1), b=(NAN, 1), c=(INF, 1))),
        (40, step(a=(1.0, 1), b=(3.0, 1), c=(5.0, 1))),
    ]
    figure = rendered(vf.channel_plot(history), tmp_path)
    assert isinstance(figure, Figure)
    assert lines(figure) == {
        "b": [(10, 4.0), (20, None), (30, None), (40, 3.0)],
        "a": [(10, 2.0), (20, 1.5), (30, None), (40, 1.0)],
        "c": [(10, None), (20, None), (30, None), (40, 5.0)],
    }
    assert legend(figure) == ["b", "a", "c"]


def test_draws_shares_of_the_tokens_that_add_up_to_1(tmp_path):
    history = [
        (1, step(a=(1.0, 6), b=(1.0, 2))),
        (2, step(b=(1.0, 5))),
        (3, step(a=(1.0, 1), b=(1.0, 1), c=(1.0, 2))),
    ]
    a, b, c = edges(rendered(vf.channel_plot(history), tmp_path))
    assert a == {1: (0, 0.75), 2: (0, 0), 3: (0, 0.25)}
    assert b == {1: (0.75, 1), 2: (0, 1), 3: (0.25, 0.5)}
    assert c == {1: (1, 1), 2: (1, 1), 3: (0.5, 1)}


def test_tokens_of_no_channel_have_a_line_and_a_share_of_their_own_in_grey(tmp_path):
    other = {"channel_unattributed_loss": 6.0, "channel_unattributed_tokens": 3.0}
    figure = vf.channel_plot([(1, step(a=(1.0, 1)) | other), (2, step(a=(2.0, 1), b=(1.0, 1)))])
    figure = rendered(figure, tmp_path)
    assert lines(figure)["(unattributed)"] == [(1, 6.0), (2, None)]
    assert legend(figure) == ["a", "b", "(unattributed)"]
    assert edges(figure)[-1] == {1: (0.25, 1.0), 2: (1.0, 1.0)}
    colors = [to_hex(line.get_color()) for line in figure.axes[0].get_lines()]
    assert colors[-1] == to_hex("grey") and to_hex("grey") not in colors[:-1]


def test_steps_without_any_token_have_no_shares(tmp_path):
    history = [(k, step(a=(1.0, 1)) if k != 3 else {}) for k in range(1, 6)]
    (area,) = edges(rendered(vf.channel_plot(history), tmp_path))
    assert area == {k: (0, 1) for k in (1, 2, 4, 5)}


def test_tokens_that_are_no_number_count_as_none(tmp_path):
    a, b = edges(rendered(vf.channel_plot([(k, step(a=(1.0, NAN), b=(1.0, 4))) for k in (1, 2)]), tmp_path))
    assert a == {1: (0, 0), 2: (0, 0)}
    assert b == {1: (0, 1), 2: (0, 1)}


def test_a_single_step_shows(tmp_path):
    figure = rendered(vf.channel_plot([(7, step(a=(1.0, 1), b=(2.0, 3)))]), tmp_path)
    assert lines(figure) == {"a": [(7, 1.0)], "b": [(7, 2.0)]}
    assert [line.get_markevery() for line in figure.axes[0].get_lines()] == [[0], [0]]
    assert edges(figure) == [{6.5: (0, 0.25), 7.5: (0, 0.25)}, {6.5: (0.25, 1), 7.5: (0.25, 1)}]


def test_of_many_points_those_are_marked_that_no_line_would_show():
    absent = {0, 2, 4, 5, 8, 98}  # so that 1, 3 and 99 stand alone
    history = [(k, step(b=(1.0, 1)) | ({} if k in absent else step(a=(2.0, 1)))) for k in range(100)]
    marks = {line.get_label(): line.get_markevery() for line in vf.channel_plot(history).axes[0].get_lines()}
    assert marks == {"a": [1, 3, 99], "b": []}


def test_steps_are_put_in_order_and_the_last_of_the_same_counts():
    history = [(20, step(a=(2.0, 1))), (10, step(a=(3.0, 1))), (20, step(a=(1.0, 1)))]
    assert lines(vf.channel_plot(iter(history))) == {"a": [(10, 3.0), (20, 1.0)]}


def styles(figure):
    return {
        line.get_label(): (to_hex(line.get_color()), line.get_linestyle())
        for line in figure.axes[0].get_lines()
    }


@pytest.mark.parametrize("num_channels", [1, 4, 40, 60])
def test_channels_are_told_apart_and_look_alike_in_both_panels(num_channels, tmp_path):
    names = [f"c{c}" for c in range(num_channels)]
    figure = rendered(
        vf.channel_plot([(k, step(**dict.fromkeys(names, (1.0, 1)))) for k in (1, 2)]), tmp_path
    )
    assert len(set(styles(figure).values())) == num_channels
    colors = [to_rgb(line.get_color()) for line in figure.axes[0].get_lines()]
    assert all(max(color) - min(color) > 0.1 for color in colors)  # grey is nobody's
    upper, lower = figure.axes
    looks = {
        (line.get_linestyle(), to_hex(line.get_color())): (area.get_hatch(), to_hex(area.get_facecolor()[0]))
        for line, area in zip(upper.get_lines(), lower.collections, strict=True)
    }
    assert all(line[1] == area[1] for line, area in looks.items())
    assert len(set(looks.values())) == num_channels
    assert legend(figure) == names


@pytest.mark.parametrize("num_channels", [1, 4, 40, 100])
def test_the_legend_stands_beside_the_panels_and_inside_of_the_figure(num_channels, tmp_path):
    names = [f"a_source_of_quite_some_length_{c}" for c in range(num_channels)]
    figure = rendered(
        vf.channel_plot([(k, step(**dict.fromkeys(names, (1.0, 1)))) for k in (1, 2)]), tmp_path
    )
    box = figure.legends[0].get_window_extent()
    for axes in figure.axes:
        panel = axes.get_window_extent()
        assert panel.x1 <= box.x0
        assert panel.width > 0.4 * figure.bbox.width
    assert box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1


def test_a_channel_keeps_its_look_when_others_come():
    few, many = step(a=(1.0, 1), b=(1.0, 1)), step(c=(1.0, 1), a=(1.0, 1), b=(1.0, 1))
    other = {"channel_unattributed_loss": 6.0, "channel_unattributed_tokens": 3.0}
    before, after = (
        styles(vf.channel_plot([(1, few)])),
        styles(vf.channel_plot([(1, few | other), (2, many)])),
    )
    assert before == {name: after[name] for name in before}


def test_long_names_and_such_that_legends_leave_out_are_in_the_legend(tmp_path):
    long = "x" * 50 + "/" + "y" * 50
    history = [(1, step(**{"_a": (1.0, 1), long: (1.0, 1), "train/b": (1.0, 1)}))]
    figure = rendered(vf.channel_plot(history), tmp_path)
    assert legend(figure) == ["_a", "x" * 14 + "…" + "y" * 15, "train/b"]


def test_panels_share_their_steps_and_say_what_they_show():
    upper, lower = vf.channel_plot([(k, step(a=(1.0, 1))) for k in (1, 2)]).axes
    assert upper.get_xlim() == lower.get_xlim()
    assert (upper.get_ylabel(), lower.get_ylabel()) == ("loss, nats per token", "share of tokens")
    assert lower.get_xlabel() == "step"
    assert lower.get_ylim() == (0, 1)


def test_draws_what_channel_metrics_returns(tmp_path):
    import torch

    labels, ids = torch.ones(4).long(), torch.tensor([0, 0, 2, -1])
    sums = vf.channel_sums(torch.tensor([1.0, 2.0, 6.0, 3.0]), labels, ids, 3)
    metrics = vf.channel_metrics({"channel": sums}, ("c++", "b"))
    figure = rendered(vf.channel_plot([(1, metrics), (2, metrics)]), tmp_path)
    drawn = {"c__": 1.5, "2": 6.0, "(unattributed)": 3.0}
    assert lines(figure) == {name: [(1, loss), (2, loss)] for name, loss in drawn.items()}
    assert [area[2] for area in edges(figure)] == [(0, 0.5), (0.5, 0.75), (0.75, 1)]


def test_belongs_to_no_window_system():
    import matplotlib.pyplot as plt

    vf.channel_plot([(1, step(a=(1.0, 1)))])
    assert plt.get_fignums() == []


def test_an_empty_history_is_refused():
    for empty in ([], iter(())):
        with pytest.raises(ValueError, match="history is empty"):
            vf.channel_plot(empty)


def test_a_history_of_other_metrics_is_refused_and_what_it_has_is_named():
    with pytest.raises(ValueError, match=r"metrics like 'channel_loss/<name>', it has loss, moe/max_vio/max"):
        vf.channel_plot([(1, step())])
    with pytest.raises(ValueError, match="it has none"):
        vf.channel_plot([(1, {})])
