"""A picture of the max violation of every layer over a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["router_plot"]

LAYER = re.compile(r"moe/max_vio/layer_(\d+)")
Curves: TypeAlias = dict[str, tuple[str, dict[str, Any]]]  # key: (label, style)
OVER_LAYERS: Curves = {  # the worst layer is a band behind its line
    "moe/max_vio/max": ("worst layer", {"color": "black", "linewidth": 6, "alpha": 0.2, "zorder": 1.5}),
    "moe/max_vio/mean": ("mean over layers", {"color": "tab:red", "linewidth": 2.5}),
    "moe/random_max_vio/mean": ("random routing", {"color": "black", "linestyle": "--"}),
}
LINEAR = 0.01  # up to here the axis is linear, for the sake of 0


def router_plot(history: Iterable[tuple[int, Mapping[str, float]]]) -> Figure:
    """The max violation of each layer over the steps, as a matplotlib figure.

    Layers are thin lines, from dark for the first to light for the last. A grey band marks the worst layer of
    each step, a thick line the mean over layers. Dashed is the noise floor, what tokens that choose at random
    would show. The axis is logarithmic. Where a layer has no tokens its line has a gap.

    Args:
        history: steps, each with its metrics as `router_metrics` returns them; other metrics are ignored.
            They are put in order; of a step that is there twice, as in a resumed run, the last counts.

    Returns:
        A figure that belongs to no window system: `figure.savefig("vio.png")`, `wandb.Image(figure)`.

    Raises:
        ValueError: the history is empty, or no max violation is in it.

    Example:
        >>> import veofunc as vf
        >>> metrics = {"moe/max_vio/layer_0": 0.5, "moe/max_vio/max": 0.5, "moe/max_vio/mean": 0.5}
        >>> vf.router_plot([(10, metrics), (20, metrics)]).axes[0].get_ylabel()
        'max load / mean load − 1'
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    metrics = dict(history)
    if not metrics:
        raise ValueError("history is empty, it must have a step with metrics: [(step, router_metrics(...))]")
    steps = sorted(metrics)
    keys = {key for each in metrics.values() for key in each}
    layers = sorted(int(match[1]) for match in map(LAYER.fullmatch, keys) if match)
    if not layers:
        has = ", ".join(sorted(keys)) or "none"
        raise ValueError(f"history must have metrics like 'moe/max_vio/layer_0', it has {has}")

    def values(key: str) -> list[float]:
        return [_finite(metrics[step].get(key)) for step in steps]

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    color_of = _colorbar(figure, axes, layers[-1])
    drawn: Curves = {
        f"moe/max_vio/layer_{i}": (f"layer {i}", {"color": color_of(i), "linewidth": 1}) for i in layers
    }
    seen = []
    for key, (label, style) in (drawn | OVER_LAYERS).items():
        line = values(key)
        if not all(map(math.isnan, line)):
            axes.plot(steps, line, label=label, marker=".", markevery=_marks(line), **style)
            seen += [value for value in line if not math.isnan(value)]
    axes.set(xlabel="step", ylabel="max load / mean load − 1")
    axes.set_title("Max violation of the experts' load", loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    _logarithmic(axes, seen)
    axes.grid(alpha=0.3)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("layer ")]
    legend = figure.legend(handles=lines, loc="outside upper right", ncols=3, frameon=False)
    for line in legend.get_lines():
        line.set_marker("")
    return figure


def _colorbar(figure: Figure, axes: Axes, last: int) -> Callable[[int], Any]:
    """The colour of each layer, and a bar that shows them; yellow, hard to see, is left out."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.ticker import MaxNLocator

    viridis = matplotlib.colormaps["viridis"]
    colors = ListedColormap([viridis(0.9 * i / max(1, last)) for i in range(last + 1)])
    norm = BoundaryNorm([i - 0.5 for i in range(last + 2)], last + 1)
    bar = figure.colorbar(ScalarMappable(norm, colors), ax=axes, label="layer", aspect=30)
    ticks = MaxNLocator(integer=True, nbins=10, min_n_ticks=1).tick_values(0, last)
    bar.set_ticks([tick for tick in ticks if 0 <= tick <= last])
    bar.minorticks_off()
    bar.ax.invert_yaxis()  # the first layer on top, as in the heatmaps
    return colors


def _logarithmic(axes: Axes, values: list[float]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator, SymmetricalLogLocator

    axes.set_yscale("symlog", linthresh=LINEAR, linscale=0.5)
    low, high = min(values, default=0), max(values, default=1)
    axes.set_ylim(low / 1.3 if low > LINEAR else 0, max(high, LINEAR) * 1.3)
    subs = [1, 2, 5] if high > 3 * low else [*range(1, 10)]  # at least two ticks
    axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=LINEAR, subs=subs))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def _finite(value: float | None) -> float:
    """`value`; NaN for None, as a NaN comes back from JSON lines, and for what is not finite."""
    return float(value) if value is not None and math.isfinite(value) else math.nan


def _marks(values: list[float]) -> list[int]:
    """Which points of a line are marked: those that no line would show."""
    padded = [math.nan, *values, math.nan]
    return [i for i in range(len(values)) if math.isnan(padded[i]) and math.isnan(padded[i + 2])]
