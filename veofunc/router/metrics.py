"""Numbers to log, from the sums per router."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, pstdev

import torch
from tensordict import TensorDictBase
from torch import Tensor

from veofunc.channel.channels import Channels
from veofunc.channel.metrics import metric_names
from veofunc.router.detect import Router
from veofunc.transform import read_obs

__all__ = ["router_metrics"]

Loads = Sequence[float]  # [E], of the experts that the layer has
NORMAL = 5000.0  # from this variance on, a binomial is taken for a normal


def router_metrics(
    obs: TensorDictBase, routers: tuple[Router, ...], channels: Sequence[str] | Channels = ()
) -> dict[str, float]:
    """How unbalanced the load of the experts is, per layer and over layers, from sums.

    The violation of an expert is its load over the mean load, minus 1: 0 when balanced, -1 when it got no
    token, E - 1 when it got all. Loads are of the window that `obs` sums over, zero-weight slots left out.
    Below, c is the load of each of the E experts of a layer, p = c / Σc, and H(p) = -Σ p ln p.

    Args:
        obs: what `monitor_router` returned, or any sum of that: its `"router"` is read.
        routers: as in `.routers` of the transformed function; layer i is `routers[i]`.
        channels: names of the channels of `tokens_per_expert_by_channel`, or `Channels`; names become keys
            as in `channel_metrics`. Not needed without such sums.

    Returns:
        Of each layer, as `<metric>/layer_i`, and over layers, as `<metric>/mean` and `<metric>/max`, or
        `/min` if that is the worst layer:

        - `moe/max_vio`, `moe/min_vio` (worst: min) and `moe/avg_vio`: the highest violation, the lowest, and
          the mean of the absolute values;
        - `moe/load_entropy` (worst: min): H(p) / ln E, 1 when balanced, 0 when one expert gets all;
        - `moe/dead_experts`: the number of experts without load;
        - `moe/batch_max_vio`, with such sums: `max_vio` of a call, mean over calls with tokens of the layer.

        Over layers only:

        - `moe/effective_experts` (worst: min): exp H(p), from 1 to E;
        - `moe/cv`: standard deviation (of the population) of c over its mean;
        - `moe/load_imbalance`: max c over mean c, which is `max_vio` + 1;
        - `moe/random_max_vio`: the noise floor, the `max_vio` to expect of as many tokens that each choose
          K distinct experts at random. An approximation, to 2 % from 32 tokens on, 8 % below.

        Over layers only, with sums that are opt-in:

        - `moe/token_entropy` (worst: min): mean over tokens of the entropy of the router's probabilities,
          over ln E. Low with high `probability_entropy`: sure of itself; both low: collapsed;
        - `moe/probability_entropy` (worst: min): entropy of the mean of the probabilities, over ln E;
        - `moe/z`: mean over tokens of the squared log-partition;
        - `moe/specialisation/<name>`, of each channel with load: KL(q ‖ p) in nats, q being p of the load of
          this channel alone; 0 when it uses the experts as all tokens do. Mean over layers;
          `moe/specialisation_max/<name>` is of the highest layer. Few tokens have some by chance, about
          (E - 1) / 2 over the number of their slots.

        Layers without tokens are left out of all these: `moe/unobserved_layers` is their number,
        `moe/unobserved_layers/layer_i` is 1 for each. Of what there is any: `moe/dropped`, slots that named
        no expert or found no room; `moe/zero_weight`, slots with weight 0; `moe/unattributed_tokens`, tokens
        of routers that saw another number of them than the mask has. `{}` for an empty window.

    Raises:
        ValueError: `obs` has sums but none of routers, or of another number of routers, or there are more
            names than sums of channels.
        TypeError: `obs` is not a TensorDict or mapping, or `channels` is a str.

    Example:
        >>> import torch, veofunc as vf
        >>> from tensordict import TensorDict
        >>> sums = {"tokens_per_expert": torch.tensor([[14, 2, 0, 0]]), "dropped": torch.tensor([0])}
        >>> metrics = vf.router_metrics(TensorDict({"router": sums}), (("gate", 4, 2),))
        >>> metrics["moe/max_vio/layer_0"], metrics["moe/min_vio/layer_0"]
        (2.5, -1.0)
        >>> metrics["moe/dead_experts/max"], round(metrics["moe/random_max_vio/max"], 2)
        (2.0, 0.41)

    Source: MaxVio, of a window and of batches: https://arxiv.org/abs/2408.15664, equation 4; max, min and
    avg as in VeOmni; cv: https://arxiv.org/abs/1701.06538; the two entropies of probabilities:
    https://arxiv.org/abs/2206.02770; z: https://arxiv.org/abs/2202.08906; specialisation after
    https://arxiv.org/abs/2409.02060; effective experts as the diversity of NeMo Automodel.
    """
    names = channels.names if isinstance(channels, Channels) else channels
    if isinstance(names, str):
        raise TypeError(f"channels must be the names of all channels or Channels, got the str {names!r}")
    sums = read_obs(obs, "router", "monitor_router")
    if sums is None:
        return {}
    table = sums["tokens_per_expert"].tolist()  # [L][E]
    if len(table) != len(routers):
        raise ValueError(f"obs has {len(table)} routers, got {len(routers)}: {routers}")
    loads = {i: row[: routers[i][1]] for i, row in enumerate(table) if sum(row)}
    metrics = _of_loads(loads)
    floors = _random_max_violations(loads, routers)
    metrics |= _over_layers("moe/random_max_vio", floors, "max")
    metrics |= _of_batches(sums, loads)
    metrics |= _of_probabilities(sums, loads)
    metrics |= _of_channels(sums, loads, names)
    unobserved = [layer for layer in range(len(routers)) if layer not in loads]
    if unobserved:
        metrics["moe/unobserved_layers"] = float(len(unobserved))
        metrics |= {f"moe/unobserved_layers/layer_{layer}": 1.0 for layer in unobserved}
    for name in ("dropped", "zero_weight", "unattributed_tokens"):
        total = sums[name].sum().item() if name in sums.keys() else 0
        if total:
            metrics[f"moe/{name}"] = float(total)
    return metrics


def _of_loads(loads: Mapping[int, Loads]) -> dict[str, float]:
    def violations(load: Loads) -> list[float]:
        mean = sum(load) / len(load)
        return [each / mean - 1 for each in load]

    of_layer: tuple[tuple[str, Callable[[Loads], float], str, bool], ...] = (
        ("max_vio", lambda load: max(violations(load)), "max", True),
        ("min_vio", lambda load: min(violations(load)), "min", True),
        ("avg_vio", lambda load: fmean(map(abs, violations(load))), "max", True),
        ("load_entropy", lambda load: _relative(_entropy(load), len(load)), "min", True),
        ("dead_experts", lambda load: float(sum(each == 0 for each in load)), "max", True),
        ("effective_experts", lambda load: math.exp(_entropy(load)), "min", False),
        ("cv", lambda load: pstdev(map(float, load)) / fmean(load), "max", False),
        ("load_imbalance", lambda load: max(load) / fmean(load), "max", False),
    )
    metrics = {}
    for name, function, worst, each_layer in of_layer:
        layers = {i: function(load) for i, load in loads.items()}
        metrics |= _over_layers(f"moe/{name}", layers, worst, each_layer)
    return metrics


def _of_batches(sums: TensorDictBase, loads: Mapping[int, Loads]) -> dict[str, float]:
    if "batch_max_vio_sum" not in sums.keys():
        return {}
    totals, batches = sums["batch_max_vio_sum"].tolist(), sums["batches"].tolist()
    layers = {i: totals[i] / batches[i] for i in loads}
    return _over_layers("moe/batch_max_vio", layers, "max", each=True)


def _of_probabilities(sums: TensorDictBase, loads: Mapping[int, Loads]) -> dict[str, float]:
    """Of what routers with probabilities have; sums of 0 are of a router that shows none."""
    metrics, seen, tokens = {}, list(loads), sums["tokens"].tolist() if "tokens" in sums.keys() else []
    if "probability_sum" in sums.keys():
        table = sums["probability_sum"].tolist()
        masses = {i: table[i][: len(load)] for i, load in loads.items()}
        seen = [i for i in seen if sum(masses[i])]
        entropies = {i: _relative(_entropy(masses[i]), len(loads[i])) for i in seen}
        metrics |= _over_layers("moe/probability_entropy", entropies, "min")
    if "entropy_sum" in sums.keys():
        totals = sums["entropy_sum"].tolist()
        entropies = {i: _relative(totals[i] / tokens[i], len(loads[i])) for i in seen}
        metrics |= _over_layers("moe/token_entropy", entropies, "min")
    if "z_sum" in sums.keys():
        totals = sums["z_sum"].tolist()
        metrics |= _over_layers("moe/z", {i: totals[i] / tokens[i] for i in seen}, "max")
    return metrics


def _of_channels(sums: TensorDictBase, loads: Mapping[int, Loads], names: Sequence[str]) -> dict[str, float]:
    if "tokens_per_expert_by_channel" not in sums.keys():
        return {}
    by_channel = sums["tokens_per_expert_by_channel"].tolist()  # [C][L][E]
    metrics = {}
    for name, table in zip(names_of_channels(names, len(by_channel)), by_channel, strict=True):
        layers = [_divergence(table[i], load) for i, load in loads.items() if sum(table[i])]
        if layers:
            metrics[f"moe/specialisation/{name}"] = fmean(layers)
            metrics[f"moe/specialisation_max/{name}"] = max(layers)
    return metrics


def names_of_channels(names: Sequence[str], num_channels: int) -> Iterator[str]:
    """The names as keys; a channel without a name is called by its id."""
    if len(names) > num_channels:
        raise ValueError(f"obs has {num_channels} channels, got {len(names)} names: {names}")
    return metric_names([*names, *map(str, range(len(names), num_channels))])


def _entropy(weights: Loads) -> float:
    """In nats, of what is proportional to `weights`."""
    total = sum(weights)
    return 0.0 - math.fsum(w / total * math.log(w / total) for w in weights if w)


def _relative(entropy: float, num_experts: int) -> float:
    """Over the largest there can be; the only expert has all of it."""
    return entropy / math.log(num_experts) if num_experts > 1 else 1.0


def _divergence(part: Loads, whole: Loads) -> float:
    """KL(part ‖ whole) in nats; the part may be padded, and has load only where the whole has."""
    n, m = sum(part), sum(whole)
    nats = math.fsum(a / n * math.log(a * m / (n * b)) for a, b in zip(part, whole, strict=False) if a)
    return max(0.0, nats)  # it is by rounding only that it can be less


def _over_layers(name: str, layers: Mapping[int, float], worst: str, each: bool = False) -> dict[str, float]:
    metrics = {f"{name}/layer_{layer}": value for layer, value in layers.items()} if each else {}
    if layers:
        metrics[f"{name}/{worst}"] = (max if worst == "max" else min)(layers.values())
        metrics[f"{name}/mean"] = fmean(layers.values())
    return metrics


def _random_max_violations(loads: Mapping[int, Loads], routers: tuple[Router, ...]) -> dict[int, float]:
    known: dict[tuple[int, int, int], float] = {}  # most layers have the same numbers
    floors = {}
    for i, load in loads.items():
        top_k = max(1, min(routers[i][2], len(load)))
        case = (max(1, round(sum(load) / top_k)), len(load), top_k)
        if case not in known:
            known[case] = _random_max_violation(*case)
        floors[i] = known[case]
    return floors


def _random_max_violation(num_tokens: int, num_experts: int, top_k: int) -> float:
    """The max violation to expect where each token chooses `top_k` of `num_experts` at random.

    Each load is binomial: N tokens, each with chance K / E. Were the loads independent, their maximum would
    be at most x with probability F(x)^E. As they add up to N K, they are correlated by -1 / (E - 1): for
    normals, that is independent ones with sqrt(E / (E - 1)) times the deviation, less their mean. With few
    tokens it matters more that the largest load is never below the mean.
    """
    chance = top_k / num_experts
    mean, variance = num_tokens * chance, num_tokens * chance * (1 - chance)
    if variance == 0:
        return 0.0
    stretch = math.sqrt(num_experts / (num_experts - 1))
    if variance > NORMAL:
        z = torch.linspace(-9, 9, 3601, dtype=torch.float64, device="cpu")
        highest = torch.trapezoid(1 - torch.special.ndtr(z) ** num_experts, z).item() - 9
        return stretch * highest * math.sqrt(variance) / mean
    reach = 12 * math.sqrt(variance) + 12
    low, high = max(0, math.floor(mean - reach)), min(num_tokens, math.ceil(mean + reach))
    x = torch.arange(low, high + 1, dtype=torch.float64, device="cpu")
    tail = 1 - _binomial_cdf(x, num_tokens, chance) ** num_experts  # chance that the maximum is above x
    free = stretch * (low + tail.sum().item() - mean)
    bound = low + torch.where(x < mean, 1, tail).sum().item() - mean  # x = mean is possible
    return min(max(free, bound), num_tokens - mean) / mean


def _binomial_cdf(x: Tensor, num_tokens: int, chance: float) -> Tensor:
    """At consecutive x, from where there is next to nothing below."""
    log_choices = math.lgamma(num_tokens + 1) - torch.lgamma(x + 1) - torch.lgamma(num_tokens - x + 1)
    logs = log_choices + x * math.log(chance) + (num_tokens - x) * math.log1p(-chance)
    return logs.exp().cumsum(0).clamp(max=1)
