"""Slow, obvious references: plain Python loops over lists and numbers, no tensor arithmetic."""

import math


def cross_entropy(logits: list[float], label: int) -> float:
    """Minus the log of the softmax of `logits` at `label`, in nats."""
    highest = max(logits)
    return highest + math.log(sum(math.exp(x - highest) for x in logits)) - logits[label]


def document_ids(positions: list[list[int]]) -> list[list[int]]:
    """Document of every token; a new one wherever a position does not follow its predecessor."""
    rows, document = [], -1
    for row in positions:
        ids, previous = [], None
        for position in row:
            if previous is None or position != previous + 1:
                document += 1
            ids.append(document)
            previous = position
        rows.append(ids)
    return rows


def documents_by_length(lengths: list[int], num_tokens: int) -> list[int]:
    """Document of every token of one row from the documents' lengths; -1 past the last one."""
    ids = []
    for document, length in enumerate(lengths):
        for _ in range(length):
            ids.append(document)
    while len(ids) < num_tokens:
        ids.append(-1)
    return ids


def channel_ids(
    source: list[int], documents: list[list[int]], mask: list[list[bool]] | None = None
) -> list[list[int]]:
    """Channel of every token from the channel of every document; -1 for nobody and where masked out."""
    rows = []
    for b, row in enumerate(documents):
        ids = []
        for t, document in enumerate(row):
            padding = mask is not None and not mask[b][t]
            ids.append(-1 if document < 0 or padding else source[document])
        rows.append(ids)
    return rows


def next_token(
    tokens: list[list[int]], documents: list[list[int]], ignore_index: int = -100
) -> list[list[int]]:
    """The following token of the same document at every position, else `ignore_index`."""
    rows = []
    for row, ids in zip(tokens, documents, strict=True):
        labels = []
        for t in range(len(row)):
            inside = t + 1 < len(row) and ids[t] == ids[t + 1] and ids[t] >= 0
            labels.append(row[t + 1] if inside else ignore_index)
        rows.append(labels)
    return rows


def channel_sums(
    token_loss: list[float],
    labels: list[int],
    channel: list[int],
    num_channels: int,
    ignore_index: int = -100,
) -> dict[str, list | float | int]:
    """Sum of losses and number of tokens per channel, and of the tokens of no channel."""
    loss_sum, token_count = [0.0] * num_channels, [0] * num_channels
    other_loss, other_count = 0.0, 0
    for loss, label, c in zip(token_loss, labels, channel, strict=True):
        if label == ignore_index:
            continue
        if 0 <= c < num_channels:
            loss_sum[c] += loss
            token_count[c] += 1
        else:
            other_loss += loss
            other_count += 1
    return {
        "loss_sum": loss_sum,
        "token_count": token_count,
        "unattributed_loss_sum": other_loss,
        "unattributed_token_count": other_count,
    }


def channel_metrics(sums: dict, names: tuple[str, ...]) -> dict[str, float]:
    """Mean, share of the mean, tokens and perplexity of every channel that has tokens."""
    all_tokens = sum(sums["token_count"]) + sums["unattributed_token_count"]
    metrics = {}
    for name, loss, tokens in zip(names, sums["loss_sum"], sums["token_count"], strict=True):
        if tokens > 0:
            metrics[f"channel_loss/{name}"] = loss / tokens
            metrics[f"channel_loss_weighted/{name}"] = loss / all_tokens
            metrics[f"channel_tokens/{name}"] = tokens
            metrics[f"channel_perplexity/{name}"] = math.exp(loss / tokens)
    if sums["unattributed_token_count"] > 0:
        other_loss, other_tokens = sums["unattributed_loss_sum"], sums["unattributed_token_count"]
        metrics["channel_unattributed_loss"] = other_loss / other_tokens
        metrics["channel_unattributed_tokens"] = other_tokens
    return metrics


def router_counts(
    ids: list[list[int]], weights: list[list[float]] | None, num_experts: int
) -> dict[str, list[int] | int]:
    """What one router chose: slots per expert, the same of weight 0, tokens, and slots of no expert."""
    used, zero, dropped = [0] * num_experts, [0] * num_experts, 0
    for n, row in enumerate(ids):
        for k, expert in enumerate(row):
            if not 0 <= expert < num_experts:
                dropped += 1
            elif weights is not None and weights[n][k] == 0:
                zero[expert] += 1
            else:
                used[expert] += 1
    return {"tokens_per_expert": used, "zero_weight": zero, "tokens": len(ids), "dropped": dropped}


def violations(loads: list[int]) -> list[float]:
    """Load over mean load, minus 1, of every expert of one layer."""
    mean = sum(loads) / len(loads)
    return [load / mean - 1 for load in loads]


def router_metrics(loads: list[list[int]], dropped: int = 0) -> dict[str, float]:
    """Violations per layer and over layers, from the loads of every layer's own experts."""
    metrics, highest, lowest, average = {}, [], [], []
    unobserved = 0
    for layer, row in enumerate(loads):
        if sum(row) == 0:
            unobserved += 1
            metrics[f"moe/unobserved_layers/layer_{layer}"] = 1
            continue
        deviations = violations(row)
        highest.append(max(deviations))
        lowest.append(min(deviations))
        average.append(sum(abs(deviation) for deviation in deviations) / len(row))
        metrics[f"moe/max_vio/layer_{layer}"] = highest[-1]
        metrics[f"moe/min_vio/layer_{layer}"] = lowest[-1]
        metrics[f"moe/avg_vio/layer_{layer}"] = average[-1]
    if highest:
        metrics["moe/max_vio/max"] = max(highest)
        metrics["moe/min_vio/min"] = min(lowest)
        metrics["moe/avg_vio/max"] = max(average)
        metrics["moe/max_vio/mean"] = sum(highest) / len(highest)
        metrics["moe/min_vio/mean"] = sum(lowest) / len(lowest)
        metrics["moe/avg_vio/mean"] = sum(average) / len(average)
    if unobserved:
        metrics["moe/unobserved_layers"] = unobserved
    if dropped:
        metrics["moe/dropped"] = dropped
    return metrics
