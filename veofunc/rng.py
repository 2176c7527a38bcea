"""The random states of a process, as tensors."""

from __future__ import annotations

import random
import warnings
from math import isnan, nan
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

__all__ = ["load_rng_state", "of_host", "rng_state"]

HOST = ("torch", "numpy", "python")  # the other states are those of accelerators


def rng_state() -> TensorDict:
    """The random states of torch (CPU, all devices of the accelerator), numpy and Python; nothing is drawn.

    Those of an accelerator are under its kind ("cuda", "xpu", ...), by the index of the device.

    Raises:
        ValueError: the global generator of numpy is no longer an MT19937, as which it starts.
    """
    numpy = np.random.get_state(legacy=False)
    if numpy["bit_generator"] != "MT19937":
        raise ValueError(
            f"the global generator of numpy must be MT19937, as it is at the start, it is "
            f"{numpy['bit_generator']}; keep generators of other kinds in a variable of your own, or leave "
            "out the random states: train_state(..., rng=False)"
        )
    _, python_words, python_gauss = random.getstate()
    kind, count = _accelerator()

    def tensor(value: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(value, dtype=dtype, device="cpu")

    return TensorDict(
        {
            "torch": torch.get_rng_state(),
            kind: TensorDict({str(i): torch.get_device_module(kind).get_rng_state(i) for i in range(count)}),
            "numpy": {
                "words": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
                "position": tensor(numpy["state"]["pos"]),
                "has_gauss": tensor(numpy["has_gauss"]),
                "gauss": tensor(numpy["gauss"], torch.float64),
            },
            "python": {
                "words": tensor(python_words),
                "gauss": tensor(nan if python_gauss is None else python_gauss, torch.float64),
            },
        }
    )


def load_rng_state(saved: TensorDictBase) -> None:
    """Set the states that `rng_state` gave: the next draws are those that followed it.

    Warns:
        RuntimeWarning: a device of the saved states is not there.
    """
    saved = saved.cpu()
    torch.set_rng_state(saved["torch"])
    kind, count = _accelerator()
    for there in saved.keys() - HOST:
        for index, value in saved[there].items():
            if there == kind and int(index) < count:
                torch.get_device_module(kind).set_rng_state(value, int(index))
            else:
                text = f"there is no device {there}:{index} to set the random state of"
                warnings.warn(text, RuntimeWarning, stacklevel=3)
    numpy = saved["numpy"]
    words = numpy["words"].numpy().astype(np.uint32)
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": words, "pos": numpy["position"].item()},
            "has_gauss": numpy["has_gauss"].item(),
            "gauss": numpy["gauss"].item(),
        }
    )
    gauss = saved["python", "gauss"].item()
    words = tuple(saved["python", "words"].tolist())
    random.setstate((3, words, None if isnan(gauss) else gauss))


def of_host(saved: TensorDictBase) -> TensorDictBase:
    """Those of `saved` that every process has, whatever accelerator there is."""
    return saved.select(*HOST, strict=False)


def _accelerator() -> tuple[str, int]:
    """The kind of accelerator that is there and the number of its devices; without one, none of CUDA."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return (device.type, torch.accelerator.device_count()) if device else ("cuda", 0)
