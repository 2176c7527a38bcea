"""A picture of the load of every expert in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase

from veofunc.router.detect import Router
from veofunc.transform import read_obs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["router_heatmap"]


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
    from matplotlib.ticker import MaxNLocator

    sums = read_obs(obs, "router", "monitor_router")
    if sums is None or len(sums["tokens_per_expert"]) != len(routers):
        has = "no sums, as an empty window" if sums is None else f"{len(sums['tokens_per_expert'])} routers"
        raise ValueError(f"obs must have the sums of {len(routers)} routers, it has {has}")
    load = _relative_load(sums["tokens_per_expert"].cpu(), routers)  # [L, E]
    num_layers, num_experts = load.shape
    size = (min(4 + 0.25 * num_experts, 14), min(2 + 0.25 * num_layers, 9))  # inches
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    colors = matplotlib.colormaps["RdBu_r"].with_extremes(bad="grey")
    norm = TwoSlopeNorm(1, vmin=0, vmax=3)
    image = axes.imshow(load.numpy(), aspect="auto", cmap=colors, norm=norm, interpolation="nearest")
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_title(", ".join(filter(None, ["Expert load over mean load", caption])))
    figure.colorbar(image, label="load / mean load", extend="max", ticks=[0, 1, 2, 3], aspect=30)
    return figure


def _relative_load(tokens_per_expert: torch.Tensor, routers: tuple[Router, ...]) -> torch.Tensor:
    """[L, E] float64, NaN where there is no expert or the layer has no tokens."""
    load = tokens_per_expert.double()
    num_experts = torch.tensor([router[1] for router in routers]).unsqueeze(-1)  # [L, 1]
    exists = torch.arange(load.shape[-1]) < num_experts
    relative = load / (load.sum(-1, keepdim=True) / num_experts)  # 0 / 0 is NaN: no tokens
    return torch.where(exists, relative, torch.nan)
