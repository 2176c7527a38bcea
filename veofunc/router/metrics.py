"""Numbers to log, from the sums per router."""

from __future__ import annotations

from statistics import fmean

from tensordict import TensorDictBase

from veofunc.router.detect import Router
from veofunc.transform import read_obs

__all__ = ["router_metrics"]


def router_metrics(obs: TensorDictBase, routers: tuple[Router, ...]) -> dict[str, float]:
    """How unbalanced the load of the experts is, per layer and over layers, from sums.

    The violation of an expert is its load over the mean load, minus 1: 0 when balanced, -1 when it got no
    token, E - 1 when it got all. Loads are of the window that `obs` sums over, zero-weight slots left out.

    Args:
        obs: what `monitor_router` returned, or any sum of that: its `"router"` is read.
        routers: as in `.routers` of the transformed function; layer i is `routers[i]`.

    Returns:
        For each layer with tokens `moe/max_vio/layer_i`, `moe/min_vio/layer_i` and `moe/avg_vio/layer_i`
        (mean of the absolute values). Over layers `moe/max_vio/max`, `moe/min_vio/min`,
        `moe/avg_vio/max` (the worst layer) and `/mean` of each. Layers without tokens are left out of
        all these: `moe/unobserved_layers` is their number, `moe/unobserved_layers/layer_i` is 1 for each.
        `moe/dropped` is the number of slots that named no expert, if there are any.
        `{}` for an empty window.

    Raises:
        ValueError: `obs` has sums but none of routers, or of another number of routers.
        TypeError: `obs` is not a TensorDict or mapping.

    Example:
        >>> import torch, veofunc as vf
        >>> from tensordict import TensorDict
        >>> sums = {"tokens_per_expert": torch.tensor([[14, 2, 0, 0]]), "dropped": torch.tensor([0])}
        >>> metrics = vf.router_metrics(TensorDict({"router": sums}), (("gate", 4, 2),))
        >>> metrics["moe/max_vio/layer_0"], metrics["moe/min_vio/layer_0"]
        (2.5, -1.0)

    Source: MaxVio of arXiv 2408.15664, equation 4; max, min and avg as in VeOmni.
    """
    sums = read_obs(obs, "router", "monitor_router")
    if sums is None:
        return {}
    load = sums["tokens_per_expert"].tolist()  # [L][E]
    if len(load) != len(routers):
        raise ValueError(f"obs has {len(load)} routers, got {len(routers)}: {routers}")
    violations = {
        layer: _violations(loads[:num_experts])
        for layer, (loads, (_, num_experts, _)) in enumerate(zip(load, routers, strict=True))
        if sum(loads)
    }
    metrics = {}
    for name, of_layer, worst in (("max", max, "max"), ("min", min, "min"), ("avg", _mean_abs, "max")):
        layers = {layer: of_layer(values) for layer, values in violations.items()}
        metrics |= _over_layers(f"moe/{name}_vio", layers, worst)
    unobserved = [layer for layer in range(len(routers)) if layer not in violations]
    if unobserved:
        metrics["moe/unobserved_layers"] = float(len(unobserved))
        metrics |= {f"moe/unobserved_layers/layer_{layer}": 1.0 for layer in unobserved}
    dropped = sums["dropped"].sum().item()
    if dropped:
        metrics["moe/dropped"] = float(dropped)
    return metrics


def _violations(loads: list[int]) -> list[float]:
    mean = sum(loads) / len(loads)
    return [load / mean - 1 for load in loads]


def _mean_abs(values: list[float]) -> float:
    return fmean(map(abs, values))


def _over_layers(name: str, layers: dict[int, float], worst: str) -> dict[str, float]:
    metrics = {f"{name}/layer_{layer}": value for layer, value in layers.items()}
    if layers:
        metrics[f"{name}/{worst}"] = (max if worst == "max" else min)(layers.values())
        metrics[f"{name}/mean"] = fmean(layers.values())
    return metrics
