"""JAX-style functional transforms over PyTorch, for people who train large models with their own loop.

A transform takes a callable and returns a callable. `offload` returns the same outputs and gradients;
`with_channel_loss` and `monitor_router` return `(out, obs)`, where `obs` is a TensorDict of sums;
`async_checkpointer` saves a training state, which is one TensorDict.
"""

from veofunc import log
from veofunc.channel import packing
from veofunc.channel.channels import Channels
from veofunc.channel.linear import linear_cross_entropy
from veofunc.channel.loss import channel_sums, with_channel_loss
from veofunc.channel.metrics import channel_metrics
from veofunc.channel.plot import channel_plot
from veofunc.checkpoint.checkpointer import async_checkpointer
from veofunc.checkpoint.manifest import CheckpointError
from veofunc.checkpoint.signals import save_on_signal
from veofunc.grad import grad, grad_and_value
from veofunc.offload import policies
from veofunc.offload.call import checkpoint_name
from veofunc.offload.offload import offload
from veofunc.offload.plan import Plan, plan_offload
from veofunc.offload.saved import Fate, SavedTensor
from veofunc.offload.stores.disk import DiskStore
from veofunc.offload.stores.host import HostStore
from veofunc.offload.stores.store import Store
from veofunc.router.detect import Router, find_routers
from veofunc.router.heatmap import router_heatmap, specialisation_heatmap
from veofunc.router.metrics import router_metrics
from veofunc.router.monitor import monitor_router
from veofunc.router.plots import router_plot
from veofunc.state import load_train_state, train_state
from veofunc.window import Window, all_reduce

__all__ = [
    "Channels",
    "CheckpointError",
    "DiskStore",
    "Fate",
    "HostStore",
    "Plan",
    "Router",
    "SavedTensor",
    "Store",
    "Window",
    "all_reduce",
    "async_checkpointer",
    "channel_metrics",
    "channel_plot",
    "channel_sums",
    "checkpoint_name",
    "find_routers",
    "grad",
    "grad_and_value",
    "linear_cross_entropy",
    "load_train_state",
    "log",
    "monitor_router",
    "offload",
    "packing",
    "plan_offload",
    "policies",
    "router_heatmap",
    "router_metrics",
    "router_plot",
    "save_on_signal",
    "specialisation_heatmap",
    "train_state",
    "with_channel_loss",
]
