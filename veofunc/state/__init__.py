"""The training state as one value: taken from model and optimizer, and copied back into them."""

from veofunc.state.load import load_train_state
from veofunc.state.take import train_state

__all__ = ["load_train_state", "train_state"]
