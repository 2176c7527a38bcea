"""`HostStore`: offloaded tensors wait in host memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from veofunc.offload.layout import Layout
from veofunc.offload.stores import Slot

__all__ = ["HostStore"]


class HostStore:
    """Keeps offloaded tensors in host memory.

    Tensors that are in host memory already are not accepted: nothing would be gained. Copies are
    synchronous.

    Example:
        >>> import torch, veofunc as vf
        >>> vf.HostStore().accepts(torch.ones(3))
        False
    """

    def accepts(self, tensor: Tensor) -> bool:
        return tensor.device.type != "cpu"

    def put(self, tensor: Tensor) -> Slot:
        layout = Layout.of(tensor)
        return _HostSlot(layout, layout.to_host(tensor))


@dataclass(frozen=True, eq=False)
class _HostSlot:
    layout: Layout
    content: Tensor

    def get(self) -> Tensor:
        return self.layout.rebuild(self.content)
