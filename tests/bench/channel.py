"""Loss per channel: in one pass, and by a second one.

Forward and backward from hidden states over a vocabulary. The second pass is VeOmni's way: the plain
loss, then the token losses once more without gradient, from the logits if they are there, else from hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import veofunc as vf
from tests.bench import measure


def run(
    rounds: int = 7, tokens: int = 1024, width: int = 256, vocabulary: int = 16_000, channels: int = 8
) -> str:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width).mul_(width**-0.5).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,))
    labels[::4] = -100
    batch = {"labels": labels, "channel": torch.randint(channels, (tokens,))}

    def mean() -> Tensor:
        return F.cross_entropy(hidden @ weight.mT, labels)

    def token_loss(batch: dict) -> Tensor:
        return F.cross_entropy(hidden @ weight.mT, batch["labels"], reduction="none")

    def unreduced() -> Tensor:
        return token_loss(batch).sum() / (labels != -100).sum()

    def again_from_logits() -> Tensor:
        logits = hidden @ weight.mT
        loss = F.cross_entropy(logits, labels)
        second_pass(logits, batch, channels)
        return loss

    def again_from_hidden() -> Tensor:
        loss = mean()
        with torch.no_grad():
            second_pass(hidden @ weight.mT, batch, channels)
        return loss

    ours = vf.with_channel_loss(token_loss, channels)
    losses = {
        "F.cross_entropy, mean": mean,
        "F.cross_entropy, reduction none": unreduced,
        "with_channel_loss": lambda: ours(batch)[0],
        "plain + second pass, logits": again_from_logits,
        "plain + second pass, hidden": again_from_hidden,
    }
    steps = {}
    for name, loss in losses.items():
        memory = measure.mebibytes_on("cpu", loss)
        steps[name] = measure.timed(lambda loss=loss: loss().backward(), **memory)
    return measure.table("forward + backward", measure.interleaved(steps, rounds), others=("peak MiB",))


@torch.no_grad()
def second_pass(logits: Tensor, batch: dict, channels: int) -> tuple[Tensor, Tensor]:
    """Sum of the losses and number of the tokens of every channel, from logits [N, V]."""
    counted = batch["labels"] != -100
    losses = F.cross_entropy(logits.detach(), batch["labels"], reduction="none")
    loss_sum = torch.zeros(channels).index_add(0, batch["channel"], losses * counted)
    token_count = torch.zeros(channels).index_add(0, batch["channel"], counted.float())
    return loss_sum, token_count
