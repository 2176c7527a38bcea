"""`linear_cross_entropy`: the last projection and its loss in one pass, chunk by chunk.

The logits of one chunk of tokens at a time are made, turned into their own gradient where they lie, and
multiplied into the gradients of `hidden` and `weight`. So the loss of every token is at hand, nothing has the
size of tokens times vocabulary, and backward has only to scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function, has_torch_function

from veofunc.levels import is_functorch_wrapped_tensor

__all__ = ["linear_cross_entropy"]

REDUCTIONS = ("mean", "sum")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    divisor: float | Tensor | None = None,
    chunk: int = 512,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`F.cross_entropy(F.linear(hidden, weight, bias), labels)` in one pass, and the loss of every token.

    Gradients are made in forward, those that are asked for only, and given away in backward. So there is one
    backward per call, and no second derivative. They are summed in float32 for bfloat16 and float16. Under
    autocast the products are of its dtype.

    Args:
        hidden: [..., D], floating. What it holds where the label is ignored does not matter.
        weight: [V, D], of hidden's dtype; may be tied to the embedding. Not a DTensor.
        labels: int [...], in [0, V) or `ignore_index`; already shifted.
        bias: [V].
        ignore_index: the label that does not count.
        reduction: `"mean"` over the tokens that count, or `"sum"`.
        divisor: what the sum is divided by for `"mean"`, instead of the number of tokens that count: a
            positive number or a tensor of one, e.g. the tokens of all micro-batches and ranks.
        chunk: tokens whose logits are there at once; `chunk * V` float32 are the memory that it takes.
        z_loss: this times the square of the log-partition is added to every token's loss.
        softcap: logits are `softcap * tanh(logits / softcap)`. Takes the memory of a second chunk.

    Returns:
        `(loss, token_loss)`: `loss` [] in nats, differentiable; `token_loss` [...] in nats, without gradient,
        0 where the label is ignored, and pure cross entropy whatever `z_loss` is. Both are float32 (float64
        for float64). If no token counts, the mean is NaN as torch's, the sum 0, and gradients are zeros.

    Raises:
        ValueError: shapes disagree, an option is out of range, or a label is outside of the vocabulary (on an
            accelerator that is an asynchronous assertion).
        TypeError: a tensor or an option is of the wrong kind.
        RuntimeError: at a second backward, or a second derivative.

    Example:
        >>> import torch, veofunc as vf
        >>> hidden, weight = torch.zeros(3, 2, requires_grad=True), torch.zeros(4, 2)
        >>> loss, token_loss = vf.linear_cross_entropy(hidden, weight, torch.tensor([0, 3, -100]))
        >>> round(loss.item(), 4), token_loss.tolist()[2]
        (1.3863, 0.0)

    Source: Liger-Kernel's and torchtune's chunked losses; z-loss of PaLM, logit soft-capping of Gemma 2.
    """
    if has_torch_function((hidden, weight, labels)):  # as PyTorch's own, so that it can be seen
        options = locals()
        return handle_torch_function(linear_cross_entropy, (hidden, weight, labels), **options)
    _check_options(ignore_index, reduction, divisor, chunk, z_loss, softcap)
    dtype = _check_tensors(hidden, weight, labels, bias)
    total, token_loss, *_ = _apply(
        hidden.reshape(-1, hidden.shape[-1]),  # [N, D]
        weight,
        bias,
        labels.reshape(-1).long(),  # [N]
        (dtype, ignore_index, chunk, float(z_loss), float(softcap or 0)),
        (False, False, False),
    )
    token_loss = token_loss.view(labels.shape)
    if reduction == "sum":
        return total, token_loss
    if divisor is not None:
        return (total / divisor).reshape(()), token_loss
    count = (labels != ignore_index).sum()
    return torch.where(count > 0, total / count.clamp(min=1), math.nan), token_loss


def _apply(hidden, weight, bias, labels, options: tuple, needed: tuple[bool, ...]) -> tuple[Tensor, ...]:
    """`_OnePass`, with the gradients made that are `needed`, and those that its tensors require here."""
    recording = torch.is_grad_enabled()
    needed = tuple(
        known or (recording and tensor is not None and tensor.requires_grad)
        for known, tensor in zip(needed, (hidden, weight, bias), strict=True)
    )
    return _OnePass.apply(hidden, weight, bias, labels, options, needed)


class _OnePass(torch.autograd.Function):
    """The sum of the losses; the loss of every token; the gradients of that sum.

    These are outputs that backward never expects a gradient for: where one comes, somebody wants a second
    derivative.
    """

    @staticmethod
    def forward(hidden, weight, bias, labels, options, needed):
        return _one_pass(hidden, weight, bias, labels, *options, *needed)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, token_loss, *gradients = output
        compiling = torch.compiler.is_compiling()  # then the compiler itself refuses second derivatives
        ctx.mark_non_differentiable(token_loss, *(gradients if compiling else ()))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*gradients)
        ctx.of = [(x.dtype if needed else None) for x, needed in zip(inputs[:3], inputs[5], strict=True)]
        ctx.spent = False

    @staticmethod
    def backward(ctx, *grads):
        grad_total, _, *grads_of_gradients = grads
        compiling = torch.compiler.is_compiling()
        if not compiling and any(grad is not None for grad in grads_of_gradients):
            raise RuntimeError(
                "linear_cross_entropy has no second derivative: use F.cross_entropy(F.linear(...)) for that"
            )
        if ctx.spent:
            raise RuntimeError(
                "linear_cross_entropy makes its gradients in forward and gives them away in backward, so "
                "there is one backward per call: call it again, or add the losses and go backward once"
            )
        if grad_total is None:
            return (None,) * 6
        # They are scaled where they lie, unless somebody may ask for them again.
        ctx.spent = not (compiling or torch.is_grad_enabled() or _is_wrapped(grad_total))
        gradients: list[Tensor | None] = []
        for made, dtype in zip(ctx.saved_tensors, ctx.of, strict=True):
            scaled = made.detach().mul_(grad_total) if ctx.spent else made * grad_total
            gradients.append(None if dtype is None else scaled.to(dtype))
        return *gradients, None, None, None

    @staticmethod
    def vmap(info, in_dims, *inputs):
        def at(i: int) -> tuple:
            return tuple(
                x if dim is None or not isinstance(x, Tensor) else x.select(dim, i)
                for x, dim in zip(inputs, in_dims, strict=True)
            )

        each = [_apply(*at(i)) for i in range(info.batch_size)]
        outputs = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
        return outputs, (0,) * len(outputs)


def _is_wrapped(tensor: Tensor) -> bool:
    """Whether it stands for several tensors, or for one that a transform of `torch.func` follows."""
    return is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor)


@torch.library.custom_op(
    "veofunc::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, ScalarType dtype, int ignore_index, "
    "int chunk, float z_loss, float softcap, bool for_hidden, bool for_weight, bool for_bias) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _one_pass(hidden, weight, bias, labels, dtype, ignore_index, chunk, z_loss, softcap, *needed):
    counted = labels != ignore_index
    _check_labels(labels, counted, len(weight), ignore_index)
    labels = torch.where(counted, labels, 0)
    wide = _wide(dtype)
    token_loss, log_partition = hidden.new_zeros(2, len(hidden), dtype=wide)  # [N] each
    grad_hidden, grad_weight, grad_bias = _gradients(hidden, weight, bias, wide, needed)
    with torch.autocast(hidden.device.type, enabled=False):
        space = _Space(weight.to(dtype), bias, min(chunk, len(hidden)), softcap)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            counts, label = counted[part, None], labels[part, None]
            x = torch.where(counts, hidden[part], 0).to(dtype)  # [n, D]
            losses, log_partition[part] = space.losses(x, label)
            token_loss[part] = torch.where(counts[:, 0], losses, 0)
            if not any(needed):
                continue
            gradient = space.gradient(label, 1 + 2 * z_loss * log_partition[part, None])  # [n, V]
            if needed[0]:
                grad_hidden[part] = (gradient @ space.head).masked_fill_(~counts, 0)
            if needed[1]:
                _add_product_(grad_weight, gradient.mT, x)
            if needed[2]:
                _add_product_(grad_bias[:, None], gradient.mT, counts.to(dtype))
    total = token_loss.sum()
    if z_loss:
        total += z_loss * torch.where(counted, log_partition, 0).square().sum()
    return total, token_loss, grad_hidden, grad_weight.to(_kept(weight.dtype)), grad_bias


@_one_pass.register_fake
def _(hidden, weight, bias, labels, dtype, ignore_index, chunk, z_loss, softcap, *needed):
    wide = _wide(dtype)
    grad_hidden, grad_weight, grad_bias = _gradients(hidden, weight, bias, wide, needed)
    token_loss = hidden.new_empty(len(hidden), dtype=wide)
    return token_loss.new_empty(()), token_loss, grad_hidden, grad_weight.to(_kept(weight.dtype)), grad_bias


class _Space:
    """The memory for the logits of one chunk, in which they become their own gradient."""

    def __init__(self, head: Tensor, bias: Tensor | None, rows: int, softcap: float):
        self.head, self.bias, self.softcap = head, bias, softcap
        self.products = head.new_empty(rows, len(head))
        self.logits = self.products.to(_wide(head.dtype))  # the same memory if it is wide enough
        self.slopes = torch.empty_like(self.logits) if softcap else None
        self.partition = self.logits.new_empty(rows, 1)

    def losses(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and log-partition of each row of `x`, [n]. What it leaves is for `gradient`."""
        logits, partition = self.logits[: len(x)], self.partition[: len(x)]
        torch.mm(x, self.head.mT, out=self.products[: len(x)])
        if self.products is not self.logits:
            logits.copy_(self.products[: len(x)])
        if self.bias is not None:
            logits.add_(self.bias)
        if self.slopes is not None:
            self._cap_(logits, self.slopes[: len(x)])
        peak = logits.amax(1, keepdim=True)
        chosen = logits.sub_(peak).gather(1, label)
        torch.sum(logits.exp_(), 1, keepdim=True, out=partition)
        log_partition = partition.log()  # of logits that were shifted by their peak
        return (log_partition - chosen)[:, 0], (log_partition + peak)[:, 0]

    def _cap_(self, logits: Tensor, slopes: Tensor) -> None:
        logits.div_(self.softcap).tanh_()
        torch.mul(logits, logits, out=slopes).neg_().add_(1)
        logits.mul_(self.softcap)

    def gradient(self, label: Tensor, weights: Tensor) -> Tensor:
        """Of loss by logits [n, V], after `losses`; `weights` [n, 1] is the factor of the softmax in it."""
        n = len(label)
        gradient = self.logits[:n].mul_(weights / self.partition[:n])
        gradient.scatter_add_(1, label, gradient.new_full(label.shape, -1))
        if self.slopes is not None:
            gradient.mul_(self.slopes[:n])
        return gradient if self.products is self.logits else self.products[:n].copy_(gradient)


def _gradients(hidden, weight, bias, dtype, needed) -> tuple[Tensor, ...]:
    """Zeros for the gradients that are needed, and no elements for the others."""
    tensors = hidden, weight, bias
    shapes = [tensor.shape if need else (0,) for tensor, need in zip(tensors, needed, strict=True)]
    dtypes = hidden.dtype, torch.promote_types(dtype, weight.dtype), dtype
    return tuple(hidden.new_zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What is summed in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _kept(dtype: torch.dtype) -> torch.dtype:
    """What a sum over all tokens is kept in until backward scales it: float16 cannot hold it."""
    return torch.float32 if dtype == torch.float16 else dtype


def _check_labels(labels: Tensor, counted: Tensor, vocabulary: int, ignore_index: int) -> None:
    inside = ~counted | ((labels >= 0) & (labels < vocabulary))
    if labels.device.type != "cpu":
        torch._assert_async(inside.all(), f"labels must be in [0, {vocabulary}) or ignore_index")
    elif not inside.all():
        wrong = labels[~inside][0].item()
        raise ValueError(
            f"labels must be in [0, V) = [0, {vocabulary}) or ignore_index {ignore_index}, got {wrong}"
        )


def _check_options(ignore_index, reduction, divisor, chunk, z_loss, softcap) -> None:
    for option, value in (("ignore_index", ignore_index), ("chunk", chunk)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{option} must be an int, got {value!r}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}; the loss of every token "
            "is returned in any case"
        )
    if divisor is not None and reduction != "mean":
        raise ValueError(f"divisor is for reduction='mean', got it with {reduction!r}")
    for option, value in (
        ("divisor", None if isinstance(divisor, Tensor) else divisor),
        ("softcap", softcap),
    ):
        if value is not None and (isinstance(value, Tensor) or not 0 < value < math.inf):
            raise ValueError(f"{option} must be positive and finite, or None, got {value}")
    if isinstance(divisor, Tensor) and divisor.numel() != 1:
        raise ValueError(f"divisor must be one number, got shape {list(divisor.shape)}")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss must be finite and at least 0, got {z_loss}")


def _check_tensors(hidden, weight, labels, bias) -> torch.dtype:
    """The dtype of the products."""
    for name, tensor in (("hidden", hidden), ("weight", weight), ("labels", labels), ("bias", bias)):
        if isinstance(tensor, DTensor):
            raise TypeError(
                f"{name} must be a whole tensor, got a DTensor: call this inside the forward of the module "
                f"that FSDP gathers, or pass {name}.full_tensor() with the grad_placements that you mean"
            )
        if not isinstance(tensor, Tensor) and not (tensor is None and name == "bias"):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    shapes = hidden.dim() > 0 and weight.dim() == 2 and hidden.shape[-1] == weight.shape[1]
    if not shapes:
        raise ValueError(
            "hidden must have shape [..., D] and weight [V, D], got "
            f"{list(hidden.shape)} and {list(weight.shape)}"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels must have shape {list(hidden.shape[:-1])}, one for each row of hidden, "
            f"got {list(labels.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {list(weight.shape[:1])}, got {list(bias.shape)}")
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    dtypes = {tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None}
    if len(dtypes) > 1 or not hidden.is_floating_point():
        raise TypeError(
            "hidden, weight and bias must have one floating dtype, or be under autocast, got "
            f"{', '.join(map(str, sorted(dtypes, key=str)))}"
        )
    return hidden.dtype
