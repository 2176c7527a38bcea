"""Asynchronous checkpoints of the whole training state."""

from veofunc.checkpoint.checkpointer import Checkpointer, Save, async_checkpointer
from veofunc.checkpoint.manifest import CheckpointError

__all__ = ["CheckpointError", "Checkpointer", "Save", "async_checkpointer"]
