"""Tensors of every dtype, and their bits."""

import torch

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ),
    *(torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    torch.bool,
]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of any values there are, also those that are not a number."""
    generator = torch.Generator().manual_seed(seed)
    highest = 2 if dtype is torch.bool else 256
    raw = torch.randint(highest, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Its values as they lie in memory when it is contiguous."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
