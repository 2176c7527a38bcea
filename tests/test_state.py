"""Resuming is exact: the steps after a restore are those of a run that was never stopped."""

import copy
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict, is_non_tensor
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adam, AdamW, Muon, Optimizer, SparseAdam
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from veofunc.channel.channels import Channels
from veofunc.checkpoint import async_checkpointer
from veofunc.state import load_train_state, train_state
from veofunc.window import Window


class Tied(nn.Module):
    """Dropout draws, a buffer counts, and one weight has two names."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.embed(x))))


def train(model, optimizer, scheduler, num_steps) -> list[float]:
    losses = []
    for _ in range(num_steps):
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(loss.item())
        else:
            scheduler.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "adamw foreach": lambda p: AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "adamw tensor lr": lambda p: AdamW(p, lr=torch.tensor(0.1), betas=(torch.tensor(0.8), torch.tensor(0.9))),
    "adamw plain": lambda p: AdamW(p, lr=0.1, foreach=False, betas=(0.8, 0.9)),
    "adam amsgrad": lambda p: Adam(p, lr=0.1, amsgrad=True),
    "sgd momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "sgd": lambda p: SGD(p, lr=0.1),
    "adafactor": lambda p: Adafactor(p, lr=0.1),
}
SCHEDULERS = {
    "lambda": lambda o: LambdaLR(o, lambda step: 0.9**step),
    "step": lambda o: StepLR(o, step_size=2),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=7),
    "multistep": lambda o: MultiStepLR(o, milestones=[2, 4, 4]),
    "onecycle": lambda o: OneCycleLR(o, max_lr=0.2, total_steps=20, cycle_momentum=False),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o), StepLR(o, 2)], milestones=[4]),
}


def make(optimizer, scheduler):
    model = Tied()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    return model, optimizer, SCHEDULERS[scheduler](optimizer)


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [(name, "lambda") for name in OPTIMIZERS]
    + [(name, scheduler) for name in ("adamw foreach", "adamw tensor lr") for scheduler in SCHEDULERS],
)
@pytest.mark.parametrize("num_before", [0, 3])
def test_resuming_from_disk_is_bit_equal(optimizer, scheduler, num_before, tmp_path):
    torch.manual_seed(0)
    model, opt, sched = make(optimizer, scheduler)
    train(model, opt, sched, num_before)
    with async_checkpointer(train_state(model, opt), tmp_path) as ckpt:
        ckpt.save(train_state(model, opt, scheduler=sched), num_before)
        expected = train(model, opt, sched, 5)
    other = make(optimizer, scheduler)
    torch.randn(3)
    restored = ckpt.restore(train_state(other[0], other[1], scheduler=other[2]))
    load_train_state(restored, other[0], other[1], scheduler=other[2])
    assert train(*other, 5) == expected
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other[0].state_dict()[name]), name
    assert other[1].param_groups[0]["lr"] == opt.param_groups[0]["lr"]


class Everything(nn.Module):
    """Tied, frozen and unused weights, one of no dimensions, dropout, buffers, and extra state."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 6)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.rand(()))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Parameter(torch.rand(3, 2))
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.calls = 0
        self.to(dtype)

    def forward(self, x):
        self.calls += 1
        self.seen += x.mean()
        noise = torch.rand_like(x) * random.random() * np.random.rand()
        x = self.drop(self.norm(self.embed(x + noise + self.seen[0])))
        return self.head(self.frozen(x)) * self.gain + self.calls / 10

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 6, sparse=True)

    def forward(self, x):
        return self.embed(torch.randint(8, (4,))) * x


class Loader:
    """Shuffled numbers; what is left of an epoch, and the generator, are its state."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.random = np.random.default_rng(seed)
        self.left, self.epoch = None, 0

    def __next__(self):
        if self.left is None or not len(self.left):
            self.left, self.epoch = torch.randperm(5, generator=self.generator), self.epoch + 1
        number, self.left = self.left[0].item(), self.left[1:]
        return number + self.random.random()

    def state_dict(self):
        torch_state, numpy_state = self.generator.get_state(), self.random.bit_generator.state
        return {"left": self.left, "epoch": (self.epoch,), "torch": torch_state, "numpy": numpy_state}

    def load_state_dict(self, state):
        self.left, (self.epoch,) = state["left"], state["epoch"]
        self.generator.set_state(state["torch"])
        self.random.bit_generator.state = state["numpy"]


@dataclass
class Run:
    """A model in training, with all that belongs to it."""

    model: nn.Module
    optimizer: Any
    scheduler: Any = None
    extra: dict = field(default_factory=dict)

    @classmethod
    def make(cls, seed, optimizer, scheduler=None, model=Everything, extra=None):
        """All of it new; `optimizer` and `scheduler` make one, or a dict of them."""
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        model = model()
        optimizer = optimizer(model)
        scheduler = scheduler and scheduler(optimizer)
        return cls(model, optimizer, scheduler, extra(model) if extra else {})

    def step(self):
        dtype = next(self.model.parameters()).dtype
        scaler, loader, ema = (self.extra.get(name) for name in ("scaler", "loader", "ema"))
        optimizers = several(self.optimizer)
        x = torch.randn(4, 6, dtype=dtype) + (next(loader) if loader else 0)

        def closure():
            self.model.zero_grad()
            loss = self.model(x).square().mean()
            (scaler.scale(loss) if scaler else loss).backward()
            return loss

        if isinstance(self.optimizer, LBFGS):
            loss = self.optimizer.step(closure)
        else:
            loss = closure()
            for optimizer in optimizers:
                scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
        if isinstance(ema, AveragedModel):
            ema.update_parameters(self.model)
        elif ema is not None:
            ema.apply_(
                lambda mine, new: mine.lerp_(new.detach(), 0.1),
                TensorDict(dict(self.model.named_parameters())),
            )
        for scheduler in several(self.scheduler):
            scheduler.step(*([loss.item()] if isinstance(scheduler, ReduceLROnPlateau) else []))

    def bits(self) -> dict:
        """All there is, as torch itself gives it, and the next draws."""
        loaded = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in self.extra.items()}
        return {
            "parameters": dict(self.model.named_parameters()),
            "buffers": dict(self.model.named_buffers()),
            "calls": getattr(self.model, "calls", 0),
            "optimizers": [optimizer.state_dict() for optimizer in several(self.optimizer)],
            "schedulers": [scheduler.state_dict() for scheduler in several(self.scheduler)],
            "extra": loaded,
            "draws": [torch.rand(3), np.random.rand(), random.random()],
        }


def several(given) -> list:
    return [] if given is None else [*given.values()] if isinstance(given, dict) else [given]


def assert_same(one, other, where="state"):
    """Equal in kind and bit by bit, all the way down."""
    assert type(one) is type(other), where
    if isinstance(one, dict | TensorDict):
        assert list(one.keys()) == list(other.keys()), where
        for key in one.keys():
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}.{index}")
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device), where
        assert one.detach().contiguous().view(-1).tolist() == other.detach().contiguous().view(-1).tolist(), (
            where
        )
    else:
        assert one == other or one is other, where


def through_json(state: TensorDict) -> TensorDict:
    """A copy whose leaves are tensors, and values that were JSON text."""
    copied = TensorDict()
    for name, leaf in state.items():
        if is_non_tensor(leaf):
            copied.set_non_tensor(name, json.loads(json.dumps(leaf.data)))
        else:
            copied[name] = through_json(leaf) if isinstance(leaf, TensorDict) else leaf.clone()
    return copied


def trained(model) -> list:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def groups(model) -> list:
    matrices = [parameter for parameter in trained(model) if parameter.ndim == 2]
    return [{"params": matrices, "lr": 0.1}, {"params": [p for p in trained(model) if p.ndim != 2]}]


def of_kind(kind, **options):
    matrices = kind.__name__ == "Muon"
    return lambda model: kind([p for p in trained(model) if p.ndim == 2 or not matrices], **options)


def two(model) -> dict:
    matrices, others = (group["params"] for group in groups(model))
    return {"matrices": Muon(matrices, lr=0.1), "others": AdamW(others, lr=0.1)}


adam, sgd = of_kind(AdamW, lr=0.1), of_kind(SGD, lr=0.1, momentum=0.9)
CPU_OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind not in (Optimizer, LBFGS, SparseAdam)
]
ROWS = {
    **{kind.__name__: {"optimizer": of_kind(kind)} for kind in CPU_OPTIMIZERS},
    "LBFGS": {"optimizer": of_kind(LBFGS, lr=0.1, max_iter=3, history_size=4)},
    "LBFGS with a line search": {"optimizer": of_kind(LBFGS, max_iter=3, line_search_fn="strong_wolfe")},
    "SparseAdam": {"optimizer": of_kind(SparseAdam), "model": Sparse},
    "AdamW foreach": {"optimizer": of_kind(AdamW, foreach=True)},
    "AdamW fused": {"optimizer": of_kind(AdamW, fused=True)},
    "AdamW for loop": {"optimizer": of_kind(AdamW, foreach=False)},
    "AdamW tensor lr": {"optimizer": of_kind(AdamW, lr=torch.tensor(0.1))},
    "AdamW amsgrad": {"optimizer": of_kind(AdamW, amsgrad=True, maximize=True)},
    "AdamW named": {"optimizer": lambda model: AdamW(model.named_parameters())},
    "RMSprop full": {"optimizer": of_kind(torch.optim.RMSprop, centered=True, momentum=0.9)},
    "groups": {"optimizer": lambda model: AdamW(groups(model), lr=0.01)},
    "two optimizers": {"optimizer": two},
    "two of each": {
        "optimizer": two,
        "scheduler": lambda o: {"a": StepLR(o["matrices"], 2), "b": CosineAnnealingLR(o["others"], 9)},
    },
    "float64": {"optimizer": adam, "model": partial(Everything, torch.float64)},
    "bfloat16": {"optimizer": adam, "model": partial(Everything, torch.bfloat16)},
    "bfloat16 fused": {"optimizer": of_kind(AdamW, fused=True), "model": partial(Everything, torch.bfloat16)},
    "scaler": {
        "optimizer": sgd,
        "extra": lambda m: {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)},
    },
    "scaler off": {
        "optimizer": sgd,
        "extra": lambda m: {"scaler": torch.amp.GradScaler("cpu", enabled=False)},
    },
    "ema": {"optimizer": adam, "extra": lambda m: {"ema": AveragedModel(m, use_buffers=True)}},
    "ema of parameters": {
        "optimizer": adam,
        "extra": lambda m: {"ema": AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9))},
    },
    "ema as a TensorDict": {
        "optimizer": adam,
        "extra": lambda m: {"ema": TensorDict(dict(m.named_parameters())).detach().clone()},
    },
    "loader": {"optimizer": adam, "extra": lambda m: {"loader": Loader(torch.randint(99, ()).item())}},
    "lambda": {"optimizer": sgd, "scheduler": lambda o: LambdaLR(o, lambda step: 0.9**step)},
    "lambda object": {"optimizer": sgd, "scheduler": lambda o: LambdaLR(o, Decay())},
    "multiplicative": {"optimizer": sgd, "scheduler": lambda o: MultiplicativeLR(o, lambda step: 0.9)},
    "step": {"optimizer": sgd, "scheduler": lambda o: StepLR(o, 2)},
    "multistep": {"optimizer": sgd, "scheduler": lambda o: MultiStepLR(o, [2, 4, 4])},
    "constant": {"optimizer": sgd, "scheduler": lambda o: ConstantLR(o, total_iters=4)},
    "linear": {"optimizer": sgd, "scheduler": lambda o: LinearLR(o)},
    "exponential": {"optimizer": sgd, "scheduler": lambda o: ExponentialLR(o, 0.9)},
    "polynomial": {"optimizer": sgd, "scheduler": lambda o: PolynomialLR(o, 9)},
    "cosine": {"optimizer": sgd, "scheduler": lambda o: CosineAnnealingLR(o, 7)},
    "restarts": {"optimizer": sgd, "scheduler": lambda o: CosineAnnealingWarmRestarts(o, 2)},
    "cyclic": {"optimizer": sgd, "scheduler": lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=2)},
    "onecycle": {"optimizer": adam, "scheduler": lambda o: OneCycleLR(o, 0.2, total_steps=20)},
    "plateau": {"optimizer": sgd, "scheduler": lambda o: ReduceLROnPlateau(o, patience=0)},
    "swa": {"optimizer": sgd, "scheduler": lambda o: SWALR(o, 0.05, anneal_epochs=4)},
    "sequential": {
        "optimizer": sgd,
        "scheduler": lambda o: SequentialLR(o, [LinearLR(o), StepLR(o, 2)], milestones=[4]),
    },
    "chained": {"optimizer": sgd, "scheduler": lambda o: ChainedScheduler([LinearLR(o), StepLR(o, 2)])},
    "a tensor as lr and a schedule": {
        "optimizer": lambda m: AdamW(groups(m), lr=torch.tensor(0.1), foreach=False),
        "scheduler": lambda o: SequentialLR(o, [LinearLR(o), StepLR(o, 2)], milestones=[4]),
    },
    "all together": {
        "optimizer": two,
        "scheduler": lambda o: {
            name: OneCycleLR(each, 0.2, 20, cycle_momentum=False) for name, each in o.items()
        },
        "extra": lambda m: {
            "ema": AveragedModel(m),
            "loader": Loader(torch.randint(99, ()).item()),
            "scaler": torch.amp.GradScaler("cpu", growth_interval=2),
        },
    },
}


class Decay:
    """A schedule with a state of its own."""

    def __init__(self):
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return 0.95**self.calls


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("num_steps", [0, 1, 4])
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")  # where the scaler skips a step
def test_resumed_equals_uninterrupted(row, num_steps):
    run = Run.make(0, **row)
    for _ in range(num_steps):
        run.step()
    state = train_state(run.model, run.optimizer, scheduler=run.scheduler, buffers="all", **run.extra)
    state = through_json(state.clone())
    for _ in range(max(num_steps, 1)):
        run.step()
    expected = run.bits()
    other = Run.make(1, **row)
    other.step()
    load_train_state(state, other.model, other.optimizer, scheduler=other.scheduler, **other.extra)
    for _ in range(max(num_steps, 1)):
        other.step()
    assert_same(other.bits(), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_optimizer_state_keeps_the_dtype_in_which_it_was_saved(dtype):
    model = nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = AdamW(model.parameters())
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = torch.full_like(state["exp_avg"], 1 / 3, dtype=dtype)
    state = train_state(model, optimizer).clone()
    other = nn.Linear(2, 2).to(torch.bfloat16)
    loaded = AdamW(other.parameters())
    load_train_state(state, other, loaded)
    for mine, theirs in zip(loaded.state.values(), optimizer.state.values(), strict=True):
        assert mine["exp_avg"].dtype == dtype
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
        assert mine["step"].dtype == torch.float32
        assert mine["step"].item() == 1
    assert loaded.param_groups[0]["betas"] == (0.9, 0.999)


def test_parameters_are_found_by_name_in_whatever_order_the_optimizer_has_them():
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    first = SGD([model.weight, model.bias], lr=1.0, momentum=0.9)
    second = SGD([other.bias, other.weight], lr=1.0, momentum=0.9)
    model(torch.ones(1, 2)).square().sum().backward()
    first.step()
    load_train_state(train_state(model, first), other, second)
    for name in ("weight", "bias"):
        expected = first.state[getattr(model, name)]["momentum_buffer"]
        assert torch.equal(second.state[getattr(other, name)]["momentum_buffer"], expected)


def test_the_state_aliases_the_model_and_changes_nothing():
    model = Tied()
    optimizer = AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())
    rng = torch.get_rng_state()
    state = train_state(model, optimizer)
    assert torch.equal(rng, torch.get_rng_state())
    assert not optimizer.state
    assert list(state["optimizer", "state"].keys()) == []
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert state["model"][name].data_ptr() == tensor.data_ptr()
        assert not state["model"][name].requires_grad


def test_tied_parameters_are_under_each_name_and_only_persistent_buffers_are_there():
    state = train_state(Tied())
    assert {"embed.weight", "head.weight", "norm.running_mean"} < set(state["model"].keys())
    assert "scratch" not in set(state["model"].keys())


def test_loading_aliases_nothing():
    model, other = Tied(), Tied()
    optimizer, second = AdamW(model.parameters()), AdamW(other.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    load_train_state(train_state(model, optimizer), other, second)
    mine = {t.data_ptr() for s in optimizer.state.values() for t in s.values()}
    assert mine.isdisjoint(t.data_ptr() for s in second.state.values() for t in s.values())
    assert model.embed.weight.data_ptr() != other.embed.weight.data_ptr()


class Holding:
    """Has the state that it is given."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_one_optimizer_and_scheduler_are_sections_and_several_are_parts_of_them():
    model = nn.Linear(1, 1)
    one = SGD(model.parameters())
    state = train_state(model, one, scheduler=StepLR(one, 2), rng=False)
    assert set(state.keys()) == {"model", "optimizer", "scheduler"}
    assert set(state["optimizer"].keys()) == {"state", "param_groups"}
    assert state["optimizer", "param_groups"][0]["params"] == ["weight", "bias"]
    assert state["scheduler"]["step_size"] == 2
    state = train_state(model, {"a": one, "b": one}, scheduler={"c": StepLR(one, 3)}, rng=False)
    assert set(state["optimizer"].keys()) == {"a", "b"}
    assert set(state["optimizer", "b"].keys()) == {"state", "param_groups"}
    assert state["scheduler", "c"]["step_size"] == 3


def test_tensors_in_the_state_of_an_extra_stay_tensors_and_alias_it():
    left = torch.arange(3)
    state = train_state(nn.Linear(1, 1), loader=Holding({"epoch": (1,), "left": [left]}))
    assert state["loader", "json"] == {"epoch": {"tuple:": [1]}, "left": [{"tensor:": "left.0"}]}
    assert state["loader", "tensors"]["left.0"] is left


def test_an_extra_that_has_no_tensors_yet_restores_one_that_had(tmp_path):
    model, loader = nn.Linear(1, 1), Holding({"left": None})
    template = train_state(model, loader=loader)
    with async_checkpointer(template, tmp_path) as ckpt:
        ckpt.save(train_state(model, loader=Holding({"left": torch.arange(3), "more": {1}})), 1)
    load_train_state(ckpt.restore(template), model, loader=loader)
    assert_same(loader.state, {"left": torch.arange(3), "more": {1}})


def test_an_extra_whose_tensors_come_and_go_is_restored_as_it_was_saved(tmp_path):
    model, loader = nn.Linear(1, 1), Loader(0)
    next(loader)
    with async_checkpointer(train_state(model), tmp_path) as ckpt:
        ckpt.save(train_state(model, loader=loader), 1)
    other = Loader(1)
    load_train_state(ckpt.restore(train_state(model)), model, loader=other)
    assert [next(other) for _ in range(9)] == [next(loader) for _ in range(9)]


def test_buffers_that_are_not_persistent_are_there_if_asked_for():
    model = Everything()
    assert "seen" not in train_state(model)["model"].keys()
    ema = AveragedModel(model)
    state = train_state(model, buffers="all", ema=ema)
    assert state["model", "seen"] is model.seen
    assert "module.seen" in state["ema"].keys()
    with pytest.raises(ValueError, match=r"buffers must be .* got 'none'"):
        train_state(model, buffers="none")


def test_extras_read_back_as_what_they_were(tmp_path):
    obs = TensorDict({"channel": {"loss_sum": torch.ones(2)}})
    window = Window().add(obs, 3).add(obs, 4)
    extra = {"step": 4, "note": None, "config": {"a": [1, "b"]}, "ema": obs, "seen": torch.ones(())}
    state = train_state(nn.Linear(1, 1), window=window, empty=Window(), **extra)
    with async_checkpointer(train_state(nn.Linear(1, 1)), tmp_path) as ckpt:
        ckpt.save(state, 4)
    restored = ckpt.restore(train_state(nn.Linear(1, 1)))
    assert type(restored["step"]) is int
    assert (restored["step"], restored["note"], restored["config"]) == (4, None, extra["config"])
    assert torch.equal(restored["ema", "channel", "loss_sum"], torch.ones(2))
    again = Window(**restored["window"])
    assert (again.first_step, again.last_step, again.num_steps) == (3, 4, 2)
    assert again.add(obs, 5).obs["channel", "loss_sum"].tolist() == [3, 3]
    assert Window(**restored["empty"]).empty
    assert Window(**restored["empty"]).add(obs, 1).num_steps == 1


def test_channels_come_back_with_the_names_of_when_they_were_saved(tmp_path):
    model = nn.Linear(1, 1)
    channels = Channels(("code",), capacity=3)
    channels.id("prose")
    template = train_state(model, channels=Channels())
    with async_checkpointer(template, tmp_path) as ckpt:
        state = train_state(model, SGD(model.parameters()), channels=channels)
        channels.id("law")
        ckpt.save(state, 1)
    restored = Channels(**ckpt.restore(template)["channels"])
    assert restored == Channels(("code", "prose"), capacity=3)
    assert restored.id("new") == 2
    assert channels.names == ("code", "prose", "law")


def test_rng_is_left_alone_if_it_is_not_asked_for():
    model = nn.Linear(1, 1)
    state = train_state(model, rng=False)
    assert "rng" not in set(state.keys())
    expected = torch.get_rng_state()
    load_train_state(state, model)
    assert torch.equal(torch.get_rng_state(), expected)


def test_a_parameter_that_is_not_in_the_model_is_refused():
    with pytest.raises(ValueError, match=r"has others, of shapes \[\[7\]\]"):
        train_state(nn.Linear(1, 1), SGD([nn.Parameter(torch.ones(7))]))


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"odd": {1, 2}}, "odd must be a tensor"),
        ({"odd": {"a": [torch.ones(1)]}}, r"odd\.a\.0 is a tensor inside a list or dict"),
        ({"odd": object()}, "odd must be a tensor"),
        ({"odd": SGD(nn.Linear(1, 1).parameters())}, r"odd is an optimizer; .* optimizer=\{'odd': \.\.\.\}"),
        ({"odd": Holding({"a": [object()]})}, r"odd\.a\.0 must be .* got object"),
    ],
)
def test_an_extra_that_cannot_be_saved_is_named(extra, text):
    with pytest.raises(TypeError, match=text):
        train_state(nn.Linear(1, 1), **extra)


def test_a_scheduler_whose_state_cannot_be_saved_is_named():
    model = nn.Linear(1, 1)
    scheduler = StepLR(SGD(model.parameters()), 2)
    scheduler.odd = [object()]
    with pytest.raises(TypeError, match=r"scheduler\.odd\.0 must be"):
        train_state(model, scheduler=scheduler)


class Keeping(nn.Linear):
    """Its extra state is what it was given."""

    kept: Any = None

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        ({"count": (1, {2: torch.ones(2)})}, {"count": (0, {})}),
        (torch.ones(3), torch.ones(1)),  # as some keep bytes: of any length
        (b"abc", b""),
        (3, None),
    ],
    ids=str,
)
def test_extra_state_of_a_module_comes_back_whatever_it_is(saved, own):
    model, other = (nn.Sequential(Keeping(1, 1)) for _ in range(2))
    model[0].kept, other[0].kept = saved, own
    load_train_state(through_json(train_state(model)), other)
    assert_same(other[0].kept, saved)


def test_extra_state_of_a_module_that_cannot_be_saved_is_named():
    model = nn.Sequential(Keeping(1, 1))
    model[0].kept = [object()]
    with pytest.raises(TypeError, match=r"model\.0\._extra_state\.0 must be .* got object"):
        train_state(model)


def test_every_difference_is_listed_and_nothing_is_changed():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    state = train_state(model, SGD(model["a"].parameters())).clone()
    state["rng", "python"].rename_key_("gauss", "odd")
    other = nn.ModuleDict({"a": nn.Linear(2, 3).double(), "c": nn.Linear(2, 2)})
    optimizer = AdamW([{"params": other["a"].parameters()}, {"params": other["c"].parameters()}])
    before, rng = copy.deepcopy(other.state_dict()), torch.get_rng_state()
    torch.manual_seed(1)
    seeded = torch.get_rng_state()
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        load_train_state(state, other, optimizer, scheduler=StepLR(optimizer, 2))
    for text in (
        "model.a.weight: must be torch.float64[3, 2], is torch.float32[2, 2]",
        "model.b.weight: unexpected",
        "model.c.bias: missing",
        "optimizer.param_groups: must be 2 groups, is 1",
        "optimizer.param_groups.0: missing option betas",
        "scheduler: missing",
        "rng.python.gauss: missing",
        "rng.python.odd: unexpected",
    ):
        assert text in str(caught.value)
    assert torch.equal(torch.get_rng_state(), seeded)
    assert not torch.equal(rng, seeded)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name])


def stepped(kind, model, **options):
    optimizer = kind(model.parameters(), **options)
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    optimizer.step()
    return optimizer


BREAKS = {  # what is done to the state of "weight", and what is said
    "another shape": (
        lambda s: s.set("exp_avg", torch.ones(5, 7)),
        r"exp_avg: must be \[2, 2\].*is \[5, 7\]",
    ),
    "another number": (lambda s: s.set("exp_avg", torch.ones(4)), r"exp_avg: must be \[2, 2\].*is \[4\]"),
    "a row of it": (lambda s: s.set("exp_avg", torch.ones(1, 2)), r"exp_avg: must be \[2, 2\].*is \[1, 2\]"),
    "a step with a shape": (lambda s: s.set("step", torch.ones(3)), r"step: must be .* or \[\], is \[3\]"),
    "one missing": (lambda s: s.pop("exp_avg_sq"), r"exp_avg_sq: missing, other parameters have it"),
}


@pytest.mark.parametrize(("change", "text"), BREAKS.values(), ids=BREAKS)
def test_optimizer_state_that_no_step_could_use_is_named_and_nothing_is_changed(change, text):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    state = train_state(model, stepped(AdamW, model)).clone()
    change(state["optimizer", "state", "weight"])
    second = AdamW(other.parameters())
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=rf"optimizer\.state\.weight\.{text}"):
        load_train_state(state, other, second)
    assert not second.state
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name])


TORCH_OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind not in (Optimizer, LBFGS, SparseAdam)
]


@pytest.mark.parametrize("kind", TORCH_OPTIMIZERS)
@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 3), (4, 3)], ids=str)
def test_the_state_of_every_optimizer_of_torch_is_loaded(kind, shape):
    def make():
        torch.manual_seed(0)
        parts = [torch.ones(shape), torch.rand(5, 6), torch.rand(4), torch.rand(1), torch.rand(2, 3, 4)]
        parts.append(torch.rand(()))
        return nn.ParameterList(parts[:2] if kind.__name__ == "Muon" else parts)  # it takes matrices only

    model, other = make(), make()
    optimizer, second = stepped(kind, model), kind(other.parameters())
    load_train_state(train_state(model, optimizer), other, second)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert optimizer.state[mine].keys() == second.state[theirs].keys()
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, second.state[theirs][key])


def test_the_state_of_sparse_adam_and_of_lbfgs_is_loaded():
    embedding, other = (nn.Embedding(3, 2, sparse=True) for _ in range(2))
    optimizer, second = SparseAdam(embedding.parameters()), SparseAdam(other.parameters())
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    load_train_state(train_state(embedding, optimizer), other, second)
    assert second.state[other.weight]["step"] == 1
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    optimizer, second = LBFGS(model.parameters(), max_iter=1), LBFGS(other.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # a vector of all nine elements at the first parameter
    load_train_state(train_state(model, optimizer), other, second)
    assert torch.equal(second.state[other.weight]["d"], optimizer.state[model.weight]["d"])


class Sketch(SGD):
    """Keeps for each parameter what it likes."""

    def step(self, closure=None):
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            self.state[parameter] = {f"sketch{i}": torch.ones(7, i + 1) for i in range(index + 1)}


def test_what_the_step_of_another_optimizer_keeps_is_not_judged():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    second = Sketch(other.parameters())
    load_train_state(train_state(model, stepped(Sketch, model)), other, second)
    assert second.state[other.bias].keys() == {"sketch0", "sketch1"}


def test_parameters_without_state_are_left_without():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer, second = AdamW(model.parameters()), AdamW(other.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    load_train_state(train_state(model, optimizer), other, second)
    assert second.state.keys() == {other.weight}


@pytest.mark.parametrize("section", ["scheduler", "param_groups"])
def test_what_cannot_be_decoded_changes_nothing(section):
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer, second = SGD(model.parameters()), SGD(other.parameters())
    state = train_state(model, optimizer, scheduler=StepLR(optimizer, 2))
    values = state["scheduler"] if section == "scheduler" else state["optimizer", "param_groups"][0]
    values["odd"] = {"tensor:": ["float7", 1]}
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(AttributeError, match="float7"):
        load_train_state(state, other, second, scheduler=StepLR(second, 2))
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_missing_sections_and_another_scheduler_are_named():
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters())
    with pytest.raises(ValueError, match="optimizer: missing"):
        load_train_state(train_state(model), model, optimizer)
    for part in ("state", "param_groups"):
        state = train_state(model, optimizer)
        del state["optimizer", part]
        with pytest.raises(ValueError, match=rf"optimizer\.{part}: missing"):
            load_train_state(state, model, optimizer)
    with pytest.raises(ValueError, match=r"model.weight: missing"):
        load_train_state(TensorDict(), model)
    state = train_state(model, optimizer, scheduler=StepLR(optimizer, 2))
    with pytest.raises(ValueError, match=r"scheduler\.T_max: missing[\s\S]*gamma: unexpected"):
        load_train_state(state, model, scheduler=CosineAnnealingLR(optimizer, 3))
    state["optimizer", "param_groups"][0]["params"] = ["weight", "other"]
    with pytest.raises(ValueError, match=r"param_groups.0: missing bias\n.*unexpected other"):
        load_train_state(state, model, optimizer)


def test_names_are_those_of_the_module_inside_torch_compile():
    model = nn.Linear(2, 1)
    compiled = torch.compile(model, backend="eager")
    state = train_state(compiled, torch.optim.SGD(compiled.parameters(), momentum=0.9))
    assert sorted(state["model"].keys()) == ["bias", "weight"]
    other = nn.Linear(2, 1)
    load_train_state(train_state(model), torch.compile(other, backend="eager"))
    assert torch.equal(other.weight, model.weight)


def lr_after(optimizer, scheduler, num_steps) -> list[float]:
    values = []
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        values.append(optimizer.param_groups[0]["lr"])
    return values


def test_a_scheduler_goes_on_with_the_schedule_that_was_saved_whatever_the_new_one_has(tmp_path):
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = MultiStepLR(optimizer, [2, 4])
    with async_checkpointer(train_state(model), tmp_path) as ckpt:
        ckpt.save(train_state(model, optimizer, scheduler=scheduler), 0)
    second = SGD(model.parameters(), lr=1.0)
    other = MultiStepLR(second, [3])
    load_train_state(ckpt.restore(train_state(model)), model, second, scheduler=other)
    assert type(other.milestones) is Counter
    assert other.milestones == Counter({2: 1, 4: 1})
    assert lr_after(second, other, 5) == lr_after(optimizer, scheduler, 5)
    assert second.param_groups[0]["lr"] == pytest.approx(0.01)


def test_options_of_a_group_that_the_new_optimizer_lacks_come_back_as_they_were(tmp_path):
    model = nn.Linear(1, 1)
    options = {"a": {1: "a", "1": "b"}, "b": (1, (2, 3)), "c": Counter({2: 1}), "d:": {"tuple:": [1]}}
    optimizer = SGD([{"params": model.parameters(), **options}])
    with async_checkpointer(train_state(model), tmp_path) as ckpt:
        ckpt.save(train_state(model, optimizer), 0)
    other = SGD(model.parameters())
    load_train_state(ckpt.restore(train_state(model)), model, other)
    (group,) = other.param_groups
    assert {name: group[name] for name in options} == options
    assert type(group["c"]) is Counter


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_as_option_of_a_group_is_restored_in_value_and_dtype_and_not_aliased(dtype):
    model = nn.Linear(1, 1)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-3, dtype=dtype))
    state = train_state(model, optimizer)
    optimizer.param_groups[0]["lr"].fill_(9)
    for lr in (torch.tensor(7.0), 7.0):
        other = AdamW(model.parameters(), lr=lr)
        load_train_state(state, model, other)
        restored = other.param_groups[0]["lr"]
        assert restored.dtype == dtype
        assert torch.equal(restored, torch.tensor(1e-3, dtype=dtype))


def test_a_tensor_option_goes_to_the_device_that_the_option_of_the_optimizer_has():
    model = nn.Linear(1, 1)
    options = {"one": torch.ones(()), "two": (torch.ones(()), 1, torch.ones(()))}
    state = train_state(model, SGD([{"params": model.parameters(), **options}]))
    far = torch.ones((), device="meta")
    other = SGD([{"params": model.parameters(), "one": far, "two": (far, far)}])
    load_train_state(state, model, other)
    (group,) = other.param_groups
    assert group["one"].device.type == "meta"
    assert [getattr(item, "device", item) for item in group["two"]] == [far.device, 1, torch.device("cpu")]


def test_an_optimizer_whose_state_cannot_be_saved_is_named_with_a_way_out():
    model = nn.Linear(2, 1)
    optimizer = Sketch(model.parameters())
    optimizer.state[model.weight] = {"odd": [1, object()]}
    text = r"optimizer\.state\.weight\.odd\.1 must be .* the state of Sketch .* train_state without it"
    with pytest.raises(TypeError, match=text):
        train_state(model, optimizer)


def test_a_group_option_that_is_a_larger_tensor_is_named():
    model = nn.Linear(1, 1)
    optimizer = SGD([{"params": model.parameters(), "odd": torch.ones(2)}])
    with pytest.raises(TypeError, match=r"param_groups\.0\.odd must be .* got a tensor of shape \[2\]"):
        train_state(model, optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", StepLR(SGD(nn.Linear(1, 1).parameters()), 1)], ids=type)
def test_what_is_no_optimizer_is_refused(optimizer):
    model = nn.Linear(1, 1)
    text = rf"optimizer must be a torch\.optim\.Optimizer, got {type(optimizer).__name__}"
    with pytest.raises(TypeError, match=text):
        train_state(model, optimizer)
    with pytest.raises(TypeError, match=text):
        load_train_state(train_state(model), model, optimizer)


def test_what_is_loaded_in_inference_mode_can_be_trained_on():
    model = nn.Linear(1, 6)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.1))
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    other = nn.Linear(1, 6)
    second = AdamW(other.parameters(), lr=torch.tensor(0.1))
    scheduler = LambdaLR(second, lambda step: 0.5)
    with torch.inference_mode():
        state = train_state(model, optimizer, scheduler=LambdaLR(optimizer, lambda step: 0.5))
        load_train_state(state, other, second, scheduler=scheduler)
    other(torch.ones(1, 1)).sum().backward()
    second.step()
    scheduler.step()
    for values in second.state.values():
        assert not any(value.is_inference() for value in values.values())


def test_tied_parameters_stay_tied():
    model, other = Tied(), Tied()
    state = train_state(model, SGD(model.parameters()))
    assert state["optimizer", "param_groups"][0]["params"][0] == "embed.weight"  # its first name
    load_train_state(through_json(state), other)
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, model.embed.weight)


def changed(model) -> bool:
    """Whether a model made of zeros has something else in it."""
    return any(tensor.any() for tensor in model.state_dict().values())


def zeros(model):
    for tensor in model.state_dict().values():
        tensor.zero_()
    return model


def test_all_that_was_not_saved_and_was_asked_for_is_listed():
    model, other = nn.Linear(1, 1), zeros(nn.Linear(1, 1))
    optimizer = {"a": SGD(other.parameters()), "c": SGD(other.parameters())}
    state = train_state(model, {"a": SGD(model.parameters()), "b": SGD(model.parameters())})
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        load_train_state(
            state,
            other,
            optimizer,
            scheduler={"d": StepLR(optimizer["a"], 2)},
            scaler=torch.amp.GradScaler("cpu"),
            ema=nn.Linear(1, 1),
            mean=torch.zeros(2),
        )
    for text in (
        "optimizer.b: unexpected",
        "optimizer.c: missing",
        "scheduler.d: missing",
        "scaler: missing",
        "ema.weight: missing",
        "mean: missing",
        "strict=False",
    ):
        assert text in str(caught.value)
    assert not changed(other)


@pytest.mark.parametrize(
    ("saved", "target", "text"),
    [
        (
            nn.Linear(1, 2),
            nn.Linear(1, 3),
            r"part\.weight: must be torch.float32\[3, 1\], is torch.float32\[2, 1\]",
        ),
        (torch.ones(2), torch.ones(3), r"part: must be torch.float32\[3\], is torch.float32\[2\]"),
        (
            TensorDict({"a": {"b": torch.ones(2)}}),
            TensorDict({"a": {"b": torch.ones(2).double()}}),
            r"part\.a\.b: must be torch.float64\[2\], is torch.float32\[2\]",
        ),
        (
            torch.amp.GradScaler("cpu", enabled=False),
            torch.amp.GradScaler("cpu"),
            r"part\.growth_factor: missing[\s\S]*part\.scale: missing",
        ),
        (torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False), r"part\.scale: unexpected"),
        (
            nn.Linear(1, 1),
            Holding({}),
            r"part: must be what state_dict gave, is a TensorDict of bias, weight",
        ),
        (torch.ones(1), Holding({}), r"part: must be what state_dict gave, is torch.float32\[1\]"),
        (
            TensorDict({"a": NonTensorData(1)}),
            TensorDict({"a": torch.ones(1)}),
            r"part\.a: must be .*\[1\], is JSON",
        ),
        (
            Holding({}),
            nn.Linear(1, 1),
            r"part\.weight: missing[\s\S]*part\.json: unexpected|unexpected[\s\S]*missing",
        ),
    ],
)
def test_an_extra_that_differs_is_named_and_nothing_is_changed(saved, target, text):
    model, other = nn.Linear(1, 1), zeros(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=text):
        load_train_state(train_state(model, part=saved), other, part=target)
    assert not changed(other)


@pytest.mark.parametrize(
    "target", [3, Window(), Channels(), SGD(nn.Linear(1, 1).parameters())], ids=lambda t: type(t).__name__
)
def test_an_extra_that_cannot_be_loaded_in_place_is_told_where_it_is(target):
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"part must .* got \w+; read it from the state: state\['part'\]"):
        load_train_state(train_state(model, part=1), model, part=target)


def test_an_extra_that_refuses_its_state_does_so_before_anything_is_changed():
    class Refusing(Holding):
        def load_state_dict(self, state):
            raise RuntimeError("another length")

    model, other = nn.Linear(1, 1), zeros(nn.Linear(1, 1))
    state = train_state(model, ema=model, loader=Refusing({}))
    with pytest.raises(RuntimeError, match="another length"):
        load_train_state(state, other, ema=other, loader=Refusing({}))
    assert not changed(other)


def test_a_tensordict_is_loaded_in_place_with_its_values_that_are_no_tensors():
    model = nn.Linear(1, 1)
    mean, target = (TensorDict({"a": {"b": torch.full((2,), v)}, "n": NonTensorData(v)}) for v in (1.0, 2.0))
    inner = target["a", "b"]
    load_train_state(through_json(train_state(model, mean=mean)), model, mean=target)
    assert inner.tolist() == [1, 1]
    assert target["n"] == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda o: SequentialLR(o, [StepLR(o, 2)] * 2, [1]),
            r"scheduler\._schedulers: must be 2 of them, is 3",
        ),
        (
            lambda o: SequentialLR(o, [StepLR(o, 2), StepLR(o, 2), LinearLR(o)], [1, 2]),
            r"scheduler\._schedulers\.2\.end_factor: missing",
        ),
    ],
)
def test_schedulers_that_a_scheduler_holds_are_compared(make, text):
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters())
    scheduler = SequentialLR(optimizer, [StepLR(optimizer, 2) for _ in range(3)], [1, 2])
    other = make(optimizer)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=text):
        load_train_state(train_state(model, scheduler=scheduler), model, scheduler=other)
    assert other.state_dict() == before


class Adapted(nn.Module):
    """A large layer, and a small one beside it that is trained."""

    def __init__(self):
        super().__init__()
        self.large = nn.Linear(2, 2).requires_grad_(False)
        self.small = nn.Linear(2, 2)


def test_what_is_not_strict_leaves_what_is_missing_and_says_so():
    model, other = Adapted(), Adapted()
    optimizer, second = stepped(AdamW, model.small), AdamW(other.small.parameters())
    state = train_state(model, optimizer, more=1)
    del state["model", "large.weight"], state["model", "large.bias"]
    large = copy.deepcopy(other.large.state_dict())
    with pytest.raises(ValueError, match=r"model\.large\.bias: missing"):
        load_train_state(state, other, second)
    text = r"in part[\s\S]*model\.large\.bias: missing[\s\S]*large\.weight: missing[\s\S]*scheduler: missing"
    with pytest.warns(RuntimeWarning, match=text):
        load_train_state(state, other, second, scheduler=StepLR(second, 2), strict=False)
    assert_same(other.large.state_dict(), large)
    assert_same(other.small.state_dict(), model.small.state_dict())
    assert_same(second.state_dict()["state"], optimizer.state_dict()["state"])


def test_what_is_not_strict_keeps_the_optimizer_state_of_parameters_that_were_not_saved():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, second = SGD([model.weight], lr=0.5, momentum=0.9), stepped(SGD, other, momentum=0.9)
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    kept = second.state[other.bias]["momentum_buffer"].clone()
    with pytest.warns(RuntimeWarning, match=r"optimizer\.param_groups\.0: missing bias"):
        load_train_state(train_state(model, optimizer), other, second, strict=False)
    assert torch.equal(second.state[other.bias]["momentum_buffer"], kept)
    expected = optimizer.state[model.weight]["momentum_buffer"]
    assert torch.equal(second.state[other.weight]["momentum_buffer"], expected)
    assert second.param_groups[0]["lr"] == 0.5


def test_what_is_not_strict_still_refuses_what_does_not_fit():
    model, other = nn.Linear(1, 1), zeros(nn.Linear(1, 2))
    with pytest.raises(ValueError, match=r"model\.weight: must be .*\[2, 1\]"):
        load_train_state(train_state(model), other, strict=False)
    state = train_state(model)
    del state["rng", "numpy", "gauss"]
    with pytest.raises(ValueError, match=r"rng\.numpy\.gauss: missing"):
        load_train_state(state, model, strict=False)
    optimizer = LBFGS([model.weight])
    with pytest.raises(ValueError, match=r"param_groups\.0: missing bias"):
        load_train_state(train_state(model, optimizer), model, LBFGS(model.parameters()), strict=False)


def test_what_is_not_strict_is_silent_where_all_fits():
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    load_train_state(train_state(model), other, strict=False)
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("scheduler", ["step", {"a": SGD([torch.ones(1)]), "b": 3}], ids=str)
def test_what_is_no_scheduler_is_refused(scheduler):
    text = r"scheduler(\.b)? must have state_dict and load_state_dict, got (str|int)"
    for function in (train_state, partial(load_train_state, TensorDict())):
        with pytest.raises(TypeError, match=text):
            function(nn.Linear(1, 1), scheduler=scheduler)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.filterwarnings("ignore:.*to a meta parameter.*:UserWarning")
def test_what_an_optimizer_keeps_goes_to_its_parameter_and_a_step_only_if_it_is_capturable(capturable):
    model = nn.Linear(2, 2)
    optimizer = stepped(AdamW, model)
    optimizer.param_groups[0]["capturable"] = capturable
    state = train_state(model, optimizer)
    other = nn.Linear(2, 2, device="meta")
    second = AdamW(other.parameters())
    load_train_state(state, other, second)
    kept = second.state[other.weight]
    assert kept["exp_avg"].device.type == "meta"
    assert kept["step"].device.type == ("meta" if capturable else "cpu")


def test_a_tensor_in_the_state_of_a_scheduler_goes_to_where_that_of_the_scheduler_is():
    model = nn.Linear(1, 1)
    state = train_state(model, scheduler=Holding({"lrs": [torch.ones(())]}))
    scheduler = Holding({"lrs": [torch.ones((), device="meta")]})
    load_train_state(state, model, scheduler=scheduler)
    assert scheduler.state["lrs"][0].device.type == "meta"
