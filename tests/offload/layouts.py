"""Tensors of every dtype, in every way to lie in memory that a saved tensor comes with."""

import torch

FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, *FLOAT8]
OTHERS = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint64,
]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = FLOATS + OTHERS + COMPLEX

LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "slice": lambda t: t[1:3],
    "column": lambda t: t[:, 2],
    "every second": lambda t: t[:, ::2],
    "offset": lambda t: t.view(-1)[5:],
    "expanded rows": lambda t: t[:1].expand(7, 6),
    "expanded columns": lambda t: t[:, :1].expand(4, 50),
    "expanded scalar": lambda t: t[0, 0].expand(3, 5),
    "new dimension": lambda t: t.unsqueeze(1).expand(4, 3, 6),
    "size 1 with stride 0": lambda t: t.as_strided((1, 6), (0, 1)),
    "overlapping": lambda t: t.as_strided((3, 4), (1, 1)),
    "0-dim": lambda t: t[1, 1],
    "chunk": lambda t: t.chunk(3, dim=-1)[1],
    "channels_last": lambda t: t.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
}


def numbers(dtype):
    """24 different values (as far as the dtype has them) as a matrix [4, 6]."""
    values = torch.arange(-4, 20).view(4, 6)
    if dtype in FLOAT8 or dtype == torch.bool or not dtype.is_signed:
        values = values.abs()
    return values.float().to(dtype) if dtype.is_floating_point else values.to(dtype)


def bytes_of(tensor):
    return bytes(tensor.contiguous().view(-1).view(torch.uint8))
