"""A picture of the loss and the share of every channel over a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["channel_plot"]

LOSS, TOKENS = "channel_loss/", "channel_tokens/"
NOBODY = "(unattributed)"  # no key has parentheses
LINES = ("-", "--", ":", "-.")
HATCHES = ("", "//", "..", "\\\\")
ROWS = 42  # of a column of the legend


def channel_plot(history: Iterable[tuple[int, Mapping[str, float]]]) -> Figure:
    """The loss of each channel over the steps, and its share of the tokens below, as a matplotlib figure.

    A channel keeps its colour in both, and while others come. Where it has no tokens, or its loss is not
    finite, its line has a gap. The shares of a step add up to 1, tokens of no channel (grey) among them.

    Args:
        history: steps, each with its metrics as `channel_metrics` returns them; other metrics are ignored.
            They are put in order; of a step that is there twice, as in a resumed run, the last counts.

    Returns:
        A figure that belongs to no window system: `figure.savefig("loss.png")`, `wandb.Image(figure)`.

    Raises:
        ValueError: the history is empty, or no metrics of channels are in it.

    Example:
        >>> import veofunc as vf
        >>> metrics = {"channel_loss/code": 1.5, "channel_tokens/code": 100.0}
        >>> figure = vf.channel_plot([(10, metrics), (20, metrics)])
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['loss, nats per token', 'share of tokens']
    """
    from matplotlib.figure import Figure

    metrics = dict(history)
    if not metrics:
        raise ValueError("history is empty, it must have a step with metrics: [(step, channel_metrics(...))]")
    steps = sorted(metrics)
    lines = [_by_channel(metrics[step]) for step in steps]
    names = [*dict.fromkeys(name for line in lines for name in line)]
    if not names:
        keys = sorted({key for each in metrics.values() for key in each})
        raise ValueError(f"history must have metrics like '{LOSS}<name>', it has {', '.join(keys) or 'none'}")
    names.sort(key=NOBODY.__eq__)  # which comes last, and takes no channel's colour
    styles = {name: _style(i) for i, name in enumerate(names)}
    if NOBODY in names:
        styles[NOBODY] = {"color": "grey", "linestyle": "-", "hatch": ""}
    columns = math.ceil(len(names) / ROWS)
    figure = Figure(figsize=(7 + 2 * columns, 6), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    _draw_losses(upper, steps, lines, styles)
    _draw_shares(lower, steps, lines, styles)
    _draw_legend(figure, upper, names, columns)
    return figure


def _by_channel(metrics: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Loss (NaN if it is not finite) and tokens of each channel."""
    pairs = {
        key.removeprefix(LOSS): (key, TOKENS + key.removeprefix(LOSS))
        for key in metrics
        if key.startswith(LOSS)
    }
    if "channel_unattributed_loss" in metrics:
        pairs[NOBODY] = ("channel_unattributed_loss", "channel_unattributed_tokens")
    return {
        name: (_finite(metrics[loss], math.nan), _finite(metrics.get(tokens), 0.0))
        for name, (loss, tokens) in pairs.items()
    }


def _finite(value: float | None, otherwise: float) -> float:
    """`value`; `otherwise` for None, as a NaN comes back from JSON lines, and for what is not finite."""
    return float(value) if value is not None and math.isfinite(value) else otherwise


def _style(index: int) -> dict[str, Any]:
    """Colour, line and hatch of a channel: 18 colours, the darker ones first, with four kinds of lines."""
    import matplotlib

    colors = [*range(0, 14, 2), 16, 18, *range(1, 15, 2), 17, 19]  # without the greys, 14 and 15
    kind, color = divmod(index, len(colors))
    return {
        "color": matplotlib.colormaps["tab20"](colors[color]),
        "linestyle": LINES[kind % len(LINES)],
        "hatch": HATCHES[kind % len(HATCHES)],
    }


def _draw_losses(axes: Axes, steps: list[int], lines: list[dict], styles: dict[str, dict]) -> None:
    for name, style in styles.items():
        losses = [line[name][0] if name in line else math.nan for line in lines]
        drawn = {key: style[key] for key in ("color", "linestyle")}
        axes.plot(steps, losses, label=name, marker=".", markevery=_marks(losses), **drawn)
    axes.set(ylabel="loss, nats per token", title="Loss and share of the tokens by channel")
    axes.grid(alpha=0.3)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)


def _marks(losses: list[float]) -> list[int]:
    """Which points of a line are marked: all of a few; of many, those that no line would show."""
    padded = [math.nan, *losses, math.nan]
    alone = [i for i in range(len(losses)) if math.isnan(padded[i]) and math.isnan(padded[i + 2])]
    return [*range(len(losses))] if len(losses) <= 30 else alone


def _draw_shares(axes: Axes, steps: list[int], lines: list[dict], styles: dict[str, dict]) -> None:
    from matplotlib.ticker import MaxNLocator

    totals = [sum(tokens for _, tokens in line.values()) or math.nan for line in lines]
    shares = [
        [(line[name][1] if name in line else 0.0) / total for line, total in zip(lines, totals, strict=True)]
        for name in styles
    ]
    if len(steps) == 1:  # an area needs a width
        shares = [share * 2 for share in shares]
    xs = [steps[0] - 0.5, steps[0] + 0.5] if len(steps) == 1 else steps
    areas = axes.stackplot(xs, shares, colors=[style["color"] for style in styles.values()])
    for area, style in zip(areas, styles.values(), strict=True):
        area.set(hatch=style["hatch"], edgecolor="white", linewidth=0)
    axes.set(xlabel="step", ylabel="share of tokens", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)


def _draw_legend(figure: Figure, axes: Axes, names: list[str], columns: int) -> None:
    few = len(names) <= 24
    legend = figure.legend(
        axes.get_lines(),
        [str(i) for i in range(len(names))],
        loc="outside right upper",
        ncols=columns,
        fontsize=9 if few else 7,
        labelspacing=0.5 if few else 0.35,
        handlelength=2.8,  # shows what kind of line it is
        frameon=False,
    )
    for line, text, name in zip(legend.get_lines(), legend.get_texts(), names, strict=True):
        line.set_marker("")
        # Not as labels above, where "_a" would be left out.
        text.set_text(name if len(name) <= 30 else f"{name[:14]}…{name[-15:]}")
