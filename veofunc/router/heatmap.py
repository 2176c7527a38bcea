"""Pictures of the load of every expert in every layer, of all tokens and by channel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from torch import Tensor

from veofunc.channel.channels import Channels
from veofunc.router.detect import Router
from veofunc.router.metrics import names_of_channels
from veofunc.transform import read_obs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["router_heatmap", "specialisation_heatmap"]

MOST = 6  # channels in one figure
REACH = 2  # of the colours, in powers of two
LEAST = -64  # for the logarithm of 0, which would be grey


def router_heatmap(obs: TensorDictBase, routers: tuple[Router, ...], caption: str = "") -> Figure:
    """The load of each expert over the mean load of its layer, layers by experts, as a matplotlib figure.

    White, 1, is balanced; dark blue, 0, is an expert without tokens; red is more than the mean, the same red
    from 3 times the mean on, so that figures compare and one hot expert does not hide the others. Layers
    without tokens, and experts that a layer does not have, are grey.

    Args:
        obs: what `monitor_router` returned, or any sum of that: its `"router"` is read.
        routers: as in `.routers` of the transformed function.
        caption: what the sums are over, e.g. `"steps 1-100"`.

    Returns:
        A figure that belongs to no window system: `figure.savefig("load.png")`, `wandb.Image(figure)`.

    Raises:
        ValueError: `obs` has no sums of these routers.

    Example:
        >>> import torch, veofunc as vf
        >>> from tensordict import TensorDict
        >>> sums = {"tokens_per_expert": torch.tensor([[14, 2, 0, 0]])}
        >>> obs = TensorDict({"router": sums})
        >>> vf.router_heatmap(obs, (("gate", 4, 2),), caption="steps 1-100").axes[0].get_title()
        'Expert load over mean load, steps 1-100'
    """
    import matplotlib
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    load = _relative_load(_sums(obs, routers)["tokens_per_expert"].cpu(), routers)  # [L, E]
    num_layers, num_experts = load.shape
    size = (min(4 + 0.25 * num_experts, 14), min(2 + 0.25 * num_layers, 9))  # inches
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    colors = matplotlib.colormaps["RdBu_r"].with_extremes(bad="grey")
    norm = TwoSlopeNorm(1, vmin=0, vmax=3)
    image = axes.imshow(load.numpy(), aspect="auto", cmap=colors, norm=norm, interpolation="nearest")
    axes.set(xlabel="expert", ylabel="layer")
    _whole_numbers(axes)
    axes.set_title(", ".join(filter(None, ["Expert load over mean load", caption])))
    figure.colorbar(image, label="load / mean load", extend="max", ticks=[0, 1, 2, 3], aspect=30)
    return figure


def specialisation_heatmap(
    obs: TensorDictBase, routers: tuple[Router, ...], channels: Sequence[str] | Channels, caption: str = ""
) -> Figure:
    """Which experts a channel uses more or less than all tokens do, as a matplotlib figure.

    For each of the six channels with the most load, layers by experts: the share of the channel's load that
    an expert has, over the share of all load that it has. White, 1, is no preference; red is more, blue is
    less, the same from 4 times and from a quarter on. Experts without any load, layers without any of the
    channel, and experts that a layer does not have, are grey. Few tokens look more specialised than they are.

    Args:
        obs: what `monitor_router` with `by_channel=` returned, or any sum of that: its `"router"` is read.
        routers: as in `.routers` of the transformed function.
        channels: names of the channels, or `Channels`; a channel without a name is called by its id.
        caption: what the sums are over, e.g. `"steps 1-100"`.

    Returns:
        A figure that belongs to no window system: `figure.savefig("use.png")`, `wandb.Image(figure)`.

    Raises:
        ValueError: `obs` has no sums of these routers, none by channel, or fewer than there are names.

    Example:
        >>> import torch, veofunc as vf
        >>> from tensordict import TensorDict
        >>> both = torch.tensor([[[6, 0, 0, 2]], [[0, 3, 3, 2]]])
        >>> sums = {"tokens_per_expert": both.sum(0), "tokens_per_expert_by_channel": both}
        >>> obs = TensorDict({"router": sums})
        >>> figure = vf.specialisation_heatmap(obs, (("gate", 4, 2),), ("code", "prose"))
        >>> [axes.get_title() for axes in figure.axes[:2]]
        ['code, 50 % of the load', 'prose, 50 % of the load']

    Source: the domain specialisation of https://arxiv.org/abs/2409.02060, over that of all tokens.
    """
    import matplotlib
    from matplotlib.ticker import FixedFormatter

    sums = _sums(obs, routers)
    if "tokens_per_expert_by_channel" not in sums.keys():
        raise ValueError("obs has no sums by channel: give monitor_router by_channel=")
    by_channel = sums["tokens_per_expert_by_channel"].cpu()  # [C, L, E]
    given = channels.names if isinstance(channels, Channels) else channels
    names = list(names_of_channels(given, len(by_channel)))
    totals = by_channel.sum((1, 2)).tolist()
    drawn = sorted((c for c, total in enumerate(totals) if total), key=lambda c: -totals[c])[:MOST]
    whole = sums["tokens_per_expert"].cpu()
    preference = _preference(by_channel[drawn], whole)  # [C', L, E]
    figure, grid = _small_multiples(max(1, len(drawn)), *whole.shape)
    colors = matplotlib.colormaps["RdBu_r"].with_extremes(bad="grey")
    image = None
    for axes, c, values in zip(grid, drawn, preference.numpy(), strict=False):
        image = axes.imshow(
            values, aspect="auto", cmap=colors, vmin=-REACH, vmax=REACH, interpolation="nearest"
        )
        axes.set_title(f"{_short(names[c])}, {_percent(totals[c] / whole.sum().item())} of the load", size=10)
        _whole_numbers(axes)
    figure.suptitle(", ".join(filter(None, ["Expert use by channel", caption])), size=12)
    figure.supxlabel("expert", size=10)
    figure.supylabel("layer", size=10)
    if image is None:
        grid[0].set_title("no channel has any load", size=10)
    else:
        ticks = range(-REACH, REACH + 1)
        labels = FixedFormatter([f"{2.0**tick:g}" for tick in ticks])
        bar = figure.colorbar(image, ax=grid, ticks=list(ticks), format=labels, extend="both", aspect=30)
        bar.set_label("share of the channel / share of all")
    return figure


def _sums(obs: TensorDictBase, routers: tuple[Router, ...]) -> TensorDictBase:
    sums = read_obs(obs, "router", "monitor_router")
    if sums is None or len(sums["tokens_per_expert"]) != len(routers):
        has = "no sums, as an empty window" if sums is None else f"{len(sums['tokens_per_expert'])} routers"
        raise ValueError(f"obs must have the sums of {len(routers)} routers, it has {has}")
    return sums


def _relative_load(tokens_per_expert: Tensor, routers: tuple[Router, ...]) -> Tensor:
    """[L, E] float64, NaN where there is no expert or the layer has no tokens."""
    load = tokens_per_expert.double()
    num_experts = torch.tensor([router[1] for router in routers]).unsqueeze(-1)  # [L, 1]
    exists = torch.arange(load.shape[-1]) < num_experts
    relative = load / (load.sum(-1, keepdim=True) / num_experts)  # 0 / 0 is NaN: no tokens
    return torch.where(exists, relative, torch.nan)


def _preference(by_channel: Tensor, whole: Tensor) -> Tensor:
    """[C, L, E] float64, log2 of share over share; NaN where there is no load, or none of the channel's."""
    shares, share = (load.double() / load.sum(-1, keepdim=True) for load in (by_channel, whole))
    return (shares / share).log2().clamp(min=LEAST)  # 0 / 0 is NaN: grey


def _small_multiples(num_plots: int, num_layers: int, num_experts: int) -> tuple[Figure, list[Axes]]:
    """At least as many axes as plots, in one to three columns; those that are not needed are hidden."""
    from matplotlib.figure import Figure

    most = 2 if num_experts > 256 or num_plots == 4 else 3  # an expert needs a pixel
    num_columns = min(num_plots, most)
    num_rows = math.ceil(num_plots / num_columns)
    width = min(max(1.2 + 0.2 * num_experts, 4.5 / num_columns), 13 / num_columns)  # inches
    height = min(max(0.8 + 0.2 * num_layers, 2.5 / num_rows), 9 / num_rows)
    size = (width * num_columns + 1.5, height * num_rows + 1)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).ravel().tolist()
    for axes in grid[num_plots:]:
        axes.set_visible(False)
    for axes in grid[:num_plots][-num_columns:]:  # the lowest of each column
        axes.tick_params(labelbottom=True)
    return figure, grid


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"
