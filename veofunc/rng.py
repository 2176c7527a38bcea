"""The random states of a process, as tensors."""

from __future__ import annotations

import random
import warnings
from math import isnan, nan

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

__all__ = ["load_rng_state", "rng_state"]


def rng_state() -> TensorDict:
    """The states from which torch (CPU, every CUDA device), numpy and Python draw; nothing is drawn."""
    _, words, position, has_gauss, gauss = np.random.get_state()
    _, python_words, python_gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return TensorDict(
        {
            "torch": torch.get_rng_state(),
            "cuda": TensorDict({str(index): value for index, value in enumerate(cuda)}),
            "numpy": {
                "words": torch.from_numpy(words.astype(np.int64)),
                "position": torch.tensor([position, has_gauss]),
                "gauss": torch.tensor(gauss, dtype=torch.float64),
            },
            "python": {
                "words": torch.tensor(python_words),
                "gauss": torch.tensor(nan if python_gauss is None else python_gauss).double(),
            },
        }
    )


def load_rng_state(saved: TensorDictBase) -> None:
    """Set the states that `rng_state` gave: the next draws are those that followed it.

    Warns:
        RuntimeWarning: a CUDA device of the saved states is not there.
    """
    torch.set_rng_state(saved["torch"])
    for index, value in saved["cuda"].items():
        if int(index) < torch.cuda.device_count():
            torch.cuda.set_rng_state(value, int(index))
        else:
            text = f"there is no CUDA device {index} to set the random state of"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
    words = saved["numpy", "words"].numpy().astype(np.uint32)
    position, has_gauss = saved["numpy", "position"].tolist()
    np.random.set_state(("MT19937", words, position, has_gauss, saved["numpy", "gauss"].item()))
    gauss = saved["python", "gauss"].item()
    python_words = tuple(saved["python", "words"].tolist())
    random.setstate((3, python_words, None if isnan(gauss) else gauss))
