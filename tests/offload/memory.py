"""What tensors hold, and which operations run: counted where PyTorch runs them."""

import weakref
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.offload.bodies import CloneStore


class Memory(TorchDispatchMode):
    """Bytes of the storages that operations made, while they live, and the names of the operations."""

    def __init__(self, model):
        super().__init__()
        own = (*model.parameters(), *model.buffers())
        self.storages = {tensor.untyped_storage()._cdata for tensor in own}
        self.live, self.peak, self.ops = 0, 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.ops[func._schema.name.removeprefix("aten::")] += 1
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def _note(self, storage):
        if storage._cdata not in self.storages:
            self.storages.add(storage._cdata)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._ended, storage._cdata, storage.nbytes())

    def _ended(self, address, nbytes):
        self.storages.discard(address)
        self.live -= nbytes


class Elsewhere(CloneStore):
    """Keeps its clones where no operation of PyTorch sees them."""

    def put(self, tensor):
        return ArraySlot(super().put(tensor))


class ArraySlot:
    def __init__(self, slot):
        self.shape, self.stride, self.dtype = slot.shape, slot.stride, slot.content.dtype
        self.array = slot.content.view(torch.uint8).numpy().copy()

    def get(self):
        content = torch.from_numpy(self.array).clone().view(self.dtype)
        return content.as_strided(self.shape, self.stride)


def measured(model, fn, x):
    """Bytes held between forward and backward, the most in backward, and operations of each pass."""
    model.zero_grad()
    with Memory(model) as memory:
        loss = fn(x.clone().requires_grad_()).sum()
        held, forward = memory.live, memory.ops
        memory.ops, memory.peak = Counter(), 0
        loss.backward()
        gradients = sum(parameter.nbytes for parameter in model.parameters())
    return held, memory.peak - gradients, forward, memory.ops
