"""Asynchronous checkpoints of the whole training state."""

from veofunc.checkpoint.checkpointer import Checkpointer, async_checkpointer
from veofunc.checkpoint.manifest import CheckpointError
from veofunc.checkpoint.save import Save

__all__ = ["CheckpointError", "Checkpointer", "Save", "async_checkpointer"]
