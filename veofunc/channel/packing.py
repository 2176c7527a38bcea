"""Packed rows: which token belongs to which document and channel, and what each token predicts.

Host-side helpers for a data loader or collate function. Shapes are those of the tokens, usually [B, T].
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["channel_ids", "document_ids", "next_token"]


def channel_ids(
    source: Tensor,
    *,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    document_ids: Tensor | None = None,
    mask: Tensor | None = None,
    labels: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """The channel of every token, from the channel of every document.

    Say where the documents are in one of three ways. Documents are numbered row by row, from left to
    right. Padding, and tokens of no document, get -1.

    Args:
        source: channel of each document, int [num_documents].
        position_ids: [B, T] or [T]; see `document_ids` for where a document starts.
        cu_seqlens: cumulative lengths, int [num_documents + 1], of tokens in one row. The ids have shape
            [cu_seqlens[-1]], or that of `mask`: tokens past the last document are nobody's.
        document_ids: [B, T] or [T], each an index into `source`, or -1 for nobody.
        mask: 0 or False on padding, of the tokens' shape. With `position_ids`, what is padding throughout
            is not a document.
        labels: of the tokens' shape, for batches without a mask: if `position_ids` show more documents
            than `source` has, the surplus must be documents without a label, the last ones first. They
            are padding. A mask is safer: labels cannot tell padding from a document that has none.
        ignore_index: the label that does not count.

    Returns:
        int64 of the tokens' shape, -1 for nobody.

    Raises:
        ValueError: not exactly one of the three ways, or shapes or numbers of documents that disagree.
        TypeError: ids that are not integers.

    Example:
        >>> import torch, veofunc as vf
        >>> positions = torch.tensor([[0, 1, 2, 0, 1]])
        >>> vf.packing.channel_ids(torch.tensor([7, 3]), position_ids=positions)
        tensor([[7, 7, 7, 3, 3]])
    """
    ways = {"position_ids": position_ids, "cu_seqlens": cu_seqlens, "document_ids": document_ids}
    given = {name: value for name, value in ways.items() if value is not None}
    if len(given) != 1:
        raise ValueError(f"pass exactly one of {', '.join(ways)}, got {', '.join(given) or 'none'}")
    _check_integers(source=source, **given)
    if source.dim() != 1:
        raise ValueError(
            f"source must have shape [num_documents], one channel each, got {list(source.shape)}"
        )
    if position_ids is not None:
        documents = _documents_by_position(position_ids, mask, labels, ignore_index, len(source))
    elif cu_seqlens is not None:
        documents = _documents_by_length(cu_seqlens, mask)
    else:
        documents = given["document_ids"].long()
    _check_count(documents, cu_seqlens, len(source), exact=document_ids is None)
    if mask is not None:
        _check_shape("mask", mask, documents)
        documents = torch.where(mask.bool(), documents, -1)
    nobody = source.new_full((1,), -1, dtype=torch.int64)
    return torch.cat([source.long(), nobody])[documents.clamp(min=-1)]  # index -1 is the last


def document_ids(position_ids: Tensor) -> Tensor:
    """The document of every token, numbered row by row from 0.

    A document starts wherever a position does not follow its predecessor, and at the start of a row; so
    positions may start anywhere, and a row may begin inside a document.

    Args:
        position_ids: int [B, T] or [T].

    Returns:
        int64 of the same shape.

    Raises:
        TypeError: `position_ids` are not integers.

    Example:
        >>> import torch, veofunc as vf
        >>> vf.packing.document_ids(torch.tensor([[7, 8, 0, 1], [0, 1, 2, 3]]))
        tensor([[0, 0, 1, 1],
                [2, 2, 2, 2]])
    """
    _check_integers(position_ids=position_ids)
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[..., 1:] = position_ids[..., 1:] != position_ids[..., :-1] + 1
    return starts.reshape(-1).cumsum(0).view_as(position_ids) - 1


def next_token(tokens: Tensor, document_ids: Tensor, ignore_index: int = -100) -> Tensor:
    """Labels for next-token prediction: at each position the token that follows in the same document.

    The last token of a document, the last of a row, and tokens of no document predict nothing, so no
    document pays for its neighbour's first token.

    Args:
        tokens: int [B, T] or [T]; labels that are not shifted yet will do, ignored ones stay ignored.
        document_ids: int of the same shape, -1 for nobody. Ids from positions number padding, too: where a
            mask is 0 set them to -1, `document_ids.masked_fill(mask == 0, -1)`.
        ignore_index: the label for "predicts nothing".

    Returns:
        int64 of the same shape.

    Raises:
        ValueError: the shapes differ.
        TypeError: ids that are not integers.

    Example:
        >>> import torch, veofunc as vf
        >>> tokens, documents = torch.tensor([5, 6, 7, 8]), torch.tensor([0, 0, 1, 1])
        >>> vf.packing.next_token(tokens, documents)
        tensor([   6, -100,    8, -100])
    """
    _check_integers(tokens=tokens, document_ids=document_ids)
    _check_shape("document_ids", document_ids, tokens)
    labels = torch.full_like(tokens, ignore_index, dtype=torch.int64)
    here, following = document_ids[..., :-1], document_ids[..., 1:]
    labels[..., :-1] = torch.where((here == following) & (here >= 0), tokens[..., 1:].long(), ignore_index)
    return labels


def _documents_by_position(position_ids, mask, labels, ignore_index, num_sources) -> Tensor:
    documents = document_ids(position_ids)
    if mask is not None:
        _check_shape("mask", mask, position_ids)
        documents = _without(documents, ~_any_per_document(documents, mask.bool()))
    if labels is not None:
        _check_shape("labels", labels, position_ids)
        surplus = max(_num_documents(documents) - num_sources, 0)
        unlabelled = ~_any_per_document(documents, labels != ignore_index)
        padding = unlabelled & (unlabelled.flip(0).cumsum(0).flip(0) <= surplus)
        documents = _without(documents, padding)
    return documents


def _documents_by_length(cu_seqlens: Tensor, mask: Tensor | None) -> Tensor:
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1 or cu_seqlens[0] != 0 or (cu_seqlens.diff() < 0).any():
        raise ValueError(
            f"cu_seqlens must be one-dimensional, start with 0 and never fall, got {cu_seqlens.tolist()}"
        )
    num_tokens = int(cu_seqlens[-1]) if mask is None else mask.numel()
    if num_tokens < int(cu_seqlens[-1]):
        raise ValueError(f"cu_seqlens count {int(cu_seqlens[-1])} tokens, mask has {num_tokens}")
    positions = torch.arange(num_tokens, device=cu_seqlens.device)
    documents = torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)
    documents = torch.where(positions < cu_seqlens[-1], documents, -1)
    return documents if mask is None else documents.view(mask.shape)


def _num_documents(documents: Tensor) -> int:
    return int(documents.max()) + 1 if documents.numel() else 0


def _any_per_document(documents: Tensor, flag: Tensor) -> Tensor:
    """Whether `flag` holds anywhere in each document: bool [num_documents]."""
    counts = torch.zeros(_num_documents(documents), dtype=torch.int64, device=documents.device)
    inside = documents >= 0
    return counts.index_add(0, documents[inside], flag[inside].long()) > 0


def _without(documents: Tensor, dropped: Tensor) -> Tensor:
    """`documents` numbered anew without those in `dropped` (bool [num_documents]), which become -1."""
    numbers = torch.where(dropped, -1, (~dropped).long().cumsum(0) - 1)
    return torch.where(documents >= 0, numbers[documents.clamp(min=0)], -1)


def _check_count(documents: Tensor, cu_seqlens: Tensor | None, num_sources: int, exact: bool) -> None:
    num_documents = _num_documents(documents) if cu_seqlens is None else len(cu_seqlens) - 1
    if num_documents > num_sources or (exact and num_documents != num_sources):
        raise ValueError(
            f"one source per document: found {num_documents} documents, got {num_sources} sources. "
            "Padding counts as a document unless mask= or labels= tells it apart"
        )


def _check_shape(name: str, tensor: Tensor, tokens: Tensor) -> None:
    if tensor.shape != tokens.shape:
        raise ValueError(f"{name} must have the tokens' shape {list(tokens.shape)}, got {list(tensor.shape)}")


def _check_integers(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        integers = isinstance(tensor, Tensor) and not tensor.is_floating_point()
        if not integers or tensor.dtype == torch.bool or tensor.is_complex():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be an integer tensor, got {kind}")
