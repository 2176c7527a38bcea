"""The training of train.py in the style of torch.func: `python examples/functional.py`."""

import argparse
import tempfile

import data
import torch
import torch.nn.functional as F
from model import Config, LanguageModel
from options import integer
from tensordict import TensorDict
from torch.func import functional_call

import veofunc as vf


def adam(params, grads, moments, step, lr=4e-3, b1=0.9, b2=0.95, eps=1e-8):
    """One step of Adam (https://arxiv.org/abs/1412.6980), as expressions over TensorDicts."""
    mean = moments["mean"] * b1 + grads * (1 - b1)
    square = moments["square"] * b2 + grads**2 * (1 - b2)
    update = mean / (1 - b1**step) / ((square / (1 - b2**step)).sqrt() + eps)
    return params - update * lr, TensorDict(mean=mean, square=square)


def main(argv=None):
    """Train, and print the loss of every channel as it falls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=integer(1), default=200, help="default: %(default)s")
    parser.add_argument("--log-every", type=integer(1), default=25, help="default: %(default)s")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    corpus = data.load_corpus()
    model = LanguageModel(Config())  # from here on only its structure is used

    def loss_fn(params, batch):
        inputs = batch["tokens"], batch["document_ids"]
        logits = functional_call(model, dict(params.items()), inputs)  # [B, T, V]
        return F.cross_entropy(logits.mT, batch["labels"], reduction="none")  # [B, T], nats

    store = vf.DiskStore(tempfile.gettempdir())
    objective = vf.offload(loss_fn, vf.policies.larger_than(1 << 20), model=model, store=store)
    objective = vf.with_channel_loss(objective, data.CHANNELS)
    objective = vf.monitor_router(objective, model=model)

    params = TensorDict(dict(model.named_parameters())).detach()
    moments = TensorDict(mean=params * 0, square=params * 0)
    log, window = vf.log.terminal("channel_loss/"), vf.Window()
    for step in range(1, options.steps + 1):
        batch = data.make_batch(corpus, 0, step, batch_size=8, num_tokens=256)
        grads, (_, obs) = vf.grad_and_value(objective, has_aux=True)(params, batch)
        params, moments = adam(params, grads, moments, step)
        window = window.add(obs, step)
        if step % options.log_every == 0 or step == options.steps:
            log(vf.channel_metrics(window.obs, objective.channels), step)
            window = vf.Window()


if __name__ == "__main__":
    main()
