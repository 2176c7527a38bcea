"""`blocks` inside compiled regions.

The compiler splits the operations of a region into a forward and a backward itself, and takes a word for
each, a `CheckpointPolicy` of `torch.utils.checkpoint`. `CompiledBlocks` asks the policy about the output of
each operation while a region is compiled, and says that word.

It says nothing for OFFLOAD: PyTorch's partitioners do nothing for `MUST_CPU_OFFLOAD`. Such an output is saved
by its region, where the saved-tensor hooks find it. They see only that the region saves it, so `saw` tells
them what it is.

Source: the tags that `torch.utils.checkpoint.create_selective_checkpoint_contexts` leaves in a graph.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from veofunc.offload.compiled.regions import Region, first_argument, names_of_saved
from veofunc.offload.policy import ask
from veofunc.offload.saved import Fate, SavedTensor
from veofunc.offload.tape import COLLECTIVES

__all__ = ["NAME", "CompiledBlocks"]

NAME = "veofunc.checkpoint_name"  # the annotation of a graph's node that names what it shows


# A call of a module in a graph, and the module's path.
_ModuleCall = tuple[tuple[str, str], str]


class CompiledBlocks:
    """One policy inside the compiled regions that one offloaded function runs.

    A region is compiled once, and keeps what was decided then: also when others run it, as PyTorch has one
    region for all who run the same code.

    Args:
        policy: asked about the output of each operation inside a block.
        paths: all modules that may run, compiled or not, with their paths.
        blocks: those inside which tensors may be recomputed.

    Attributes:
        names_given: the names of tensors that it met.
        num_recomputed: outputs that are recomputed, in all regions so far.
        complaints: what could not be had, for the user.
        is_late: whether a region that may run a block was compiled before.
    """

    def __init__(
        self,
        policy: Callable[[SavedTensor], Fate],
        paths: Mapping[nn.Module, str],
        blocks: Collection[nn.Module],
    ):
        self.policy, self.paths, self.blocks = policy, paths, blocks
        self.names_given: set[str] = set()
        self.num_recomputed = 0
        self.complaints: list[str] = []
        self.is_late = False
        # Regions that the policy was asked about: the path of what was compiled, and what its nodes make.
        self._made: dict[int, tuple[str | None, dict[str, SavedTensor]]] = {}
        self._saved: dict[int, list[SavedTensor | None]] = {}  # what they save, in order

    @contextlib.contextmanager
    def active(self) -> Generator[None]:
        """While it lasts, what this thread compiles obeys the policy. The innermost of several is obeyed."""
        from torch._functorch import config

        own = _Pass(self._decide, config.joint_custom_pass)
        try:
            # The cache on disk does not know of policies: it would give regions without ours, and keep ours
            # for others.
            with config.patch(joint_custom_pass=own, enable_autograd_cache=False):
                yield
        finally:
            own.is_over = True

    def saw(self, region: Region, position: int) -> SavedTensor | None:
        """`region` saves a tensor, before which it saved `position` in this call.

        Returns:
            what it is: `path`, `op` and `name` hold now, the rest when the region was compiled. None if it is
            an input of the region, or nobody knows.
        """
        if region.number in self._made:
            saved = self._saved_by(region, position)
            return None if saved is None else replace(saved, path=self._moved(saved.path, region))
        if self._may_run_a_block(region.module):
            self.is_late = True
            self._complain(
                "blocks= has no effect in a region that was compiled before: torch.compile goes on using "
                "what it compiled before the first call of this function, by another policy or by none. Call "
                "torch.compiler.reset() before that call, and use one policy for each model"
            )

        return None

    def _saved_by(self, region: Region, position: int) -> SavedTensor | None:
        if region.number not in self._saved:
            _, made = self._made[region.number]
            self._saved[region.number] = [made.get(name) for name in names_of_saved(region)]
        saved = self._saved[region.number]
        if not saved and getattr(self.policy, "reads_name", True):
            self._complain(
                "what a compiled region saves has no name and no operation for the policy: PyTorch did not "
                "say which of its tensors is which. Decide by shape or bytes, or leave the blocks uncompiled"
            )
        return saved[position % len(saved)] if saved else None

    def _moved(self, path: str, region: Region) -> str:
        """`path` where `region` runs now: modules that run the same code share it."""
        compiled_at, _ = self._made[region.number]
        runs_at = None if region.module is None else self.paths.get(region.module)
        known = compiled_at is not None and runs_at is not None
        return runs_at + path.removeprefix(compiled_at) if known else path

    def names_in(self, regions: Iterable[int]) -> set[str]:
        """The names of what is made in the regions with these numbers."""
        made = [self._made[number][1] for number in regions if number in self._made]
        return {saved.name for each in made for saved in each.values() if saved.name is not None}

    def _may_run_a_block(self, module: nn.Module | None) -> bool:
        path = None if module is None else self.paths.get(module)
        blocks = [self.paths[block] for block in self.blocks]
        return path is None or any(_is_within(path, block) or _is_within(block, path) for block in blocks)

    def _complain(self, complaint: str) -> None:
        if complaint not in self.complaints:
            self.complaints.append(complaint)

    def _decide(self, graph: fx.Graph) -> None:
        """Asks about the operations of a region, and tags them."""
        from torch._functorch.aot_autograd import get_aot_compilation_context

        root = _compiled_module()
        nodes = [node for node in graph.nodes if _is_forward(node)]
        calls = self._calls(nodes, root)
        inside = self._places(calls)
        leaving = {_storage(node) for node in inside if _leaves_block(node, inside)}
        names = _names(nodes)
        number = int(get_aot_compilation_context()[0][0].split("_")[0])
        compiled_at = None if root is None else self.paths.get(root)
        self._made[number] = compiled_at, _made(nodes, calls, names)
        self.names_given.update(name for name, _ in names.values())
        fates: dict[int, Fate | None] = {}  # of each storage; None if it comes from outside
        index = itertools.count()
        for node in nodes:
            storage = _storage(node)
            if storage is None or storage in fates:
                continue
            if node not in inside:
                fates[storage] = None
            elif _is_result(node, inside):
                saved = _describe(node, inside[node].path, next(index), names.get(storage))
                fates[storage] = self._ask(replace(saved, recomputable=storage not in leaving), root)
        _tag(inside, fates)

    def _calls(self, nodes: Iterable[fx.Node], root: nn.Module | None) -> dict[fx.Node, list[_ModuleCall]]:
        """The calls of modules that each of `nodes` runs in, outermost first."""
        paths = {str(id(module)): path for module, path in self.paths.items()}
        above = [] if root is None or root not in self.paths else [(("", ""), self.paths[root])]
        calls = {}
        for node in nodes:
            # For each module its id, and @ which call it is, with the expression that it was reached by.
            stack = [(key, name) for key, (name, _) in (node.meta.get("nn_module_stack") or {}).items()]
            known = [(call, paths[key]) for call in stack if (key := call[0].split("@")[0]) in paths]
            calls[node] = above + known
        return calls

    def _places(self, calls: Mapping[fx.Node, list[_ModuleCall]]) -> dict[fx.Node, _Place]:
        """Those nodes that run in a block, and about which nobody else has decided."""
        blocks = [self.paths[block] for block in self.blocks]
        inside = {}
        for node in filter(_may_be_tagged, calls):
            for call, path in calls[node]:
                if any(_is_within(path, block) for block in blocks):
                    operation = (call, node.meta.get("seq_nr"), str(node.meta.get("original_aten") or node))
                    inside[node] = _Place(call, operation, calls[node][-1][1])
                    break
        return inside

    def _ask(self, saved: SavedTensor, root: nn.Module | None) -> Fate:
        fate = ask(self.policy, saved)
        if root is not None and root in self.blocks and getattr(self.policy, "reads_path", True):
            self._check_that_blocks_agree(saved, root, fate)
        if fate is Fate.RECOMPUTE and not saved.recomputable:
            return Fate.KEEP
        self.num_recomputed += fate is Fate.RECOMPUTE
        return fate

    def _check_that_blocks_agree(self, saved: SavedTensor, root: nn.Module, fate: Fate) -> None:
        """Blocks of one class that are compiled one by one share a region, so all recompute the same."""
        path = self.paths[root]
        for other in (self.paths[block] for block in self.blocks if type(block) is type(root)):
            theirs = replace(saved, path=other + saved.path.removeprefix(path))
            if (ask(self.policy, theirs) is Fate.RECOMPUTE) is not (fate is Fate.RECOMPUTE):
                self._complain(
                    "blocks that are compiled one by one share one compiled region: policy "
                    f"{self.policy!r} does not recompute the same in {path!r} and {other!r}, and what it "
                    f"recomputes in {path!r} is recomputed in all of them. Compile the whole model, or do "
                    "not decide by where"
                )


class _Pass:
    """What PyTorch calls with the graph of a region before it splits it.

    Before PyTorch 2.13 all threads have one configuration, and may leave each other's in it.
    """

    def __init__(self, decide: Callable[[fx.Graph], None], found: Callable | None):
        self.decide, self.thread, self.is_over = decide, threading.get_ident(), False
        is_outer = isinstance(found, _Pass) and found.thread == self.thread
        self.others = found.others if is_outer else found

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        if threading.get_ident() == self.thread and not self.is_over:
            self.decide(graph.graph)
        return graph if self.others is None else self.others(graph, inputs)


@dataclass(frozen=True)
class _Place:
    """Where an operation of a graph runs.

    Attributes:
        block: the call of its block.
        operation: what the user called, of which it may be a part.
        path: of the innermost module.
    """

    block: tuple[str, str]
    operation: tuple
    path: str


def _made(
    nodes: Iterable[fx.Node],
    calls: Mapping[fx.Node, list[_ModuleCall]],
    names: Mapping[int | None, tuple[str, int]],
) -> dict[str, SavedTensor]:
    """By the name of its node, what each tensor is that the region's operations make."""
    makers: dict[int, fx.Node] = {}  # of each storage; views do not make one
    made = {}
    for node in nodes:
        storage = _storage(node)
        if storage is None:
            continue
        maker = makers.setdefault(storage, node)
        if maker.op == "call_function":
            path = calls[maker][-1][1] if calls[maker] else ""
            made[node.name] = replace(_describe(node, path, 0, names.get(storage)), op=_op_of(maker))
    return made


def _compiled_module() -> nn.Module | None:
    """The module whose forward is compiled at the moment. The graph says only what that calls."""
    from torch._dynamo.symbolic_convert import tls

    translator = getattr(tls, "current_tx", None)
    if translator is None:
        return None
    outermost = translator.output.root_tx
    module = first_argument(outermost.f_code, outermost.f_locals)
    return module if isinstance(module, nn.Module) else None


def _tag(inside: Mapping[fx.Node, _Place], fates: Mapping[int, Fate | None]) -> None:
    """Tells the partitioner. Where there is no tag it does as it would without us.

    What is kept is tagged only if it is computed from what is not: else the partitioner would compute both
    again. For the rest it knows better: it saves what is costly, and computes what costs next to nothing.
    """
    stored = {node: storage for node in inside if (storage := _storage(node)) is not None}
    known = {node: fates[storage] for node, storage in stored.items() if storage in fates}
    whole = {inside[node].operation for node, fate in known.items() if fate is Fate.RECOMPUTE}
    again = {
        node
        for node, place in inside.items()
        if known.get(node, Fate.RECOMPUTE) is Fate.RECOMPUTE and place.operation in whole
    }
    for node in inside:
        if node in again:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif known.get(node) is not None and not again.isdisjoint(node.all_input_nodes):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _may_be_tagged(node: fx.Node) -> bool:
    is_collective = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in COLLECTIVES
    is_decided = "recompute" in node.meta  # by the user's own torch.utils.checkpoint
    return node.op == "call_function" and not is_collective and not is_decided


def _is_forward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_forward"


def _leaves_block(node: fx.Node, inside: Mapping[fx.Node, _Place]) -> bool:
    """Whether forward uses it outside of its block."""
    users = [user for user in node.users if _is_forward(user) or user.op == "output"]
    return any(user not in inside or inside[user].block != inside[node].block for user in users)


def _is_result(node: fx.Node, inside: Mapping[fx.Node, _Place]) -> bool:
    """Whether it is a result of what the user called, and not within that."""
    return any(user not in inside or inside[user].operation != inside[node].operation for user in node.users)


def _is_within(path: str, block: str) -> bool:
    return not block or path == block or path.startswith(f"{block}.")


def _storage(node: fx.Node) -> int | None:
    """Equal for nodes that show the same values, as views do. None for what is no tensor."""
    value = node.meta.get("val")
    has_one = isinstance(value, Tensor) and torch._C._has_storage(value)
    return value.untyped_storage()._cdata if has_one else None


def _names(nodes: Iterable[fx.Node]) -> dict[int | None, tuple[str, int]]:
    """The names that `checkpoint_name` gave to storages, with the number of elements that it named."""
    named = [node for node in nodes if NAME in (node.meta.get("custom") or {})]
    return {_storage(node): (node.meta["custom"][NAME], math.prod(_shape(node))) for node in named}


def _describe(node: fx.Node, path: str, index: int, named: tuple[str, int] | None) -> SavedTensor:
    value, shape = node.meta["val"], _shape(node)
    return SavedTensor(
        path=path,
        op=_op_of(node),
        shape=shape,
        dtype=value.dtype,
        device=value.device,
        nbytes=math.prod(shape) * value.element_size(),
        index=index,
        name=named[0] if named is not None and named[1] == math.prod(shape) else None,
    )


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Sizes that may change are those of the call that compiles; one that only a run would tell is 0."""
    sizes = node.meta["val"].shape
    return tuple(n if isinstance(n, int) else n.node.hint if n.node.has_hint() else 0 for n in sizes)


def _op_of(node: fx.Node) -> str:
    target = node.meta.get("original_aten") or node.target
    schema = getattr(target, "_schema", None)
    name = getattr(target, "__name__", str(target)) if schema is None else schema.name
    return name.split("::")[-1].strip("_")
