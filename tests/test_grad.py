"""Gradients with torch.func's signatures on the autograd engine."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tensordict import TensorDict
from torch.utils.checkpoint import checkpoint

import veofunc as vf

X = torch.tensor([1.0, 2.0, -3.0])
Y = torch.tensor([0.5, -1.0, 2.0])


def f(x, y):
    return (x.sin() * y**3).sum()


def with_aux(x, y):
    return f(x, y), {"x": x * 2}


class TestSameAsTorchFunc:
    @pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (0, 1), (1, 0)])
    def test_argnums(self, argnums):
        ours, value = vf.grad_and_value(f, argnums)(X, Y)
        theirs, torch_value = torch.func.grad_and_value(f, argnums)(X, Y)
        assert type(ours) is type(theirs)
        torch.testing.assert_close((ours, value), (theirs, torch_value), rtol=0, atol=0)
        torch.testing.assert_close(vf.grad(f, argnums)(X, Y), theirs, rtol=0, atol=0)

    def test_has_aux(self):
        grads, (value, aux) = vf.grad_and_value(with_aux, has_aux=True)(X, Y)
        torch_grads, (torch_value, torch_aux) = torch.func.grad_and_value(with_aux, has_aux=True)(X, Y)
        torch.testing.assert_close((grads, value, aux), (torch_grads, torch_value, torch_aux), rtol=0, atol=0)
        ours, aux = vf.grad(with_aux, has_aux=True)(X, Y)
        assert torch.equal(ours, torch_grads)
        assert torch.equal(aux["x"], torch_aux["x"])

    def test_trees(self):
        tree = {"a": X, "b": [Y, (X * 2,)]}
        objective = lambda t: f(t["a"], t["b"][0]) + t["b"][1][0].pow(2).sum()  # noqa: E731
        torch.testing.assert_close(vf.grad(objective)(tree), torch.func.grad(objective)(tree), rtol=0, atol=0)

    def test_tensordict(self):
        params = TensorDict({"a": X, "nested": {"b.c": Y}})
        grads = vf.grad(lambda p: f(p["a"], p["nested", "b.c"]))(params)
        assert isinstance(grads, TensorDict)
        assert torch.equal(grads["nested", "b.c"], torch.func.grad(f, 1)(X, Y))

    def test_complex(self):
        z = torch.tensor([1 + 2j, -0.5j])
        objective = lambda z: (z.abs() ** 2).sum()  # noqa: E731
        torch.testing.assert_close(vf.grad(objective)(z), torch.func.grad(objective)(z))

    def test_keyword_arguments_pass_through(self):
        assert torch.equal(vf.grad(f)(X, y=Y), torch.func.grad(f)(X, Y))

    def test_keeps_name_and_docstring(self):
        assert vf.grad(f).__name__ == vf.grad_and_value(f).__name__ == "f"

    def test_results_are_detached(self):
        grads, (value, aux) = vf.grad_and_value(with_aux, has_aux=True)(X, Y)
        assert not (grads.requires_grad or value.requires_grad or aux["x"].requires_grad)

    def test_arguments_are_unchanged(self):
        x = X.clone().requires_grad_()
        vf.grad(f)(x, Y)
        assert x.grad is None and torch.equal(x, X)
        assert not X.requires_grad

    def test_inside_no_grad(self):
        with torch.no_grad():
            grads, value = vf.grad_and_value(f)(X.clone().requires_grad_(), Y)
        assert torch.equal(grads, torch.func.grad(f)(X, Y))
        assert not grads.requires_grad and not value.requires_grad


class TestHigherDerivatives:
    @pytest.mark.parametrize("library", [vf, torch.func])
    def test_nested(self, library):
        second = library.grad(lambda x: library.grad(f)(x, Y).sum())(X)
        third = library.grad(lambda x: library.grad(lambda x: library.grad(f)(x, Y).sum())(x).sum())(X)
        torch.testing.assert_close(second, -X.sin() * Y**3)
        torch.testing.assert_close(third, -X.cos() * Y**3)
        assert not second.requires_grad and not third.requires_grad

    def test_with_respect_to_what_is_closed_over(self):
        mixed = vf.grad(lambda y: vf.grad(lambda x: f(x, y))(X).sum() + y.sum())(Y)
        torch.testing.assert_close(mixed, X.cos() * 3 * Y**2 + 1)

    def test_under_an_outer_backward(self):
        y = Y.clone().requires_grad_()
        vf.grad(f)(X, y).sum().backward()
        torch.testing.assert_close(y.grad, X.cos() * 3 * Y**2)
        x = X.clone().requires_grad_()
        vf.grad(f)(x, Y).sum().backward()
        torch.testing.assert_close(x.grad, -X.sin() * Y**3)

    def test_a_graph_nobody_needs_is_freed(self):
        held = []

        def objective(x):
            h = x.exp()
            held.append(weakref.ref(h))
            return h.sum()

        grads, value = vf.grad_and_value(objective)(X)
        gc.collect()
        assert held[0]() is None
        assert grads.grad_fn is None and value.grad_fn is None


class TestOnTheEngine:
    def test_checkpointing_and_offload_work_inside(self, tmp_path):
        def objective(x, y):
            return f(checkpoint(torch.exp, x, use_reentrant=False), y)

        offloaded = vf.offload(objective, vf.policies.everything, store=vf.DiskStore(tmp_path))
        assert torch.equal(vf.grad(offloaded)(X, Y), torch.func.grad(lambda x, y: f(x.exp(), y))(X, Y))
        assert offloaded.stats()["count", "moved"] > 0

    def test_tied_tensors_are_one_variable(self):
        grads = vf.grad(lambda p: f(p["a"], p["b"]))({"a": X, "b": X})
        alone = torch.func.grad(lambda x: f(x, x))(X)
        torch.testing.assert_close(grads, {"a": alone, "b": alone})


class TestErrors:
    def test_unused_tensors_are_named(self):
        with pytest.raises(ValueError, match=r"does not depend on 1 of 2 .*argument 0\['b'\]"):
            vf.grad(lambda p: p["a"].sum())({"a": X, "b": Y})

    def test_a_value_that_depends_on_nothing(self):
        with pytest.raises(ValueError, match="does not depend on 1 of 1"):
            vf.grad(lambda x: torch.tensor(1.0))(X)

    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            (torch.tensor([1, 2]), "argument 0 must be a floating-point or complex tensor, got torch.int64"),
            ({"a": 1.0}, r"argument 0\['a'\] must be a floating-point or complex tensor, got float"),
        ],
    )
    def test_what_cannot_be_differentiated(self, argument, message):
        with pytest.raises(TypeError, match=message):
            vf.grad(lambda x: x)(argument)

    @pytest.mark.parametrize("shape", [(1,), (2, 2)])
    def test_a_value_that_is_no_scalar(self, shape):
        with pytest.raises(ValueError, match=r"must return a scalar tensor \(shape \[\]\), got shape"):
            vf.grad(lambda x: x.sum() * torch.ones(shape))(X)

    def test_a_pair_without_has_aux(self):
        with pytest.raises(TypeError, match="got tuple; it observes, so pass has_aux=True"):
            vf.grad(with_aux)(X, Y)

    def test_has_aux_without_a_pair(self):
        with pytest.raises(TypeError, match=r"has_aux=True says that func returns \(value, aux\)"):
            vf.grad(f, has_aux=True)(X, Y)

    def test_too_few_arguments(self):
        with pytest.raises(ValueError, match="argnums names argument 2, but there are 2"):
            vf.grad(f, argnums=2)(X, Y)

    @pytest.mark.parametrize("argnums", [[0, 1], True, "0", None, 1.0, (0, True)])
    def test_argnums_of_another_kind(self, argnums):
        with pytest.raises(TypeError, match="argnums must be an int or a tuple of ints"):
            vf.grad(f, argnums)

    @pytest.mark.parametrize("argnums", [(), (0, 0)])
    def test_argnums_that_repeat_or_are_none(self, argnums):
        with pytest.raises(ValueError, match="argnums must be one or more different positions"):
            vf.grad(f, argnums)

    def test_positions_that_are_one_argument(self):
        with pytest.raises(ValueError, match="name one argument twice"):
            vf.grad(f, (0, -2))(X, Y)

    def test_what_is_not_callable(self):
        with pytest.raises(TypeError, match="func must be callable, got NoneType"):
            vf.grad(None)

    def test_where_the_engine_is_off(self):
        with torch.inference_mode(), pytest.raises(RuntimeError, match=r"use torch\.func\.grad there"):
            vf.grad(f)(X, Y)
        with pytest.raises(RuntimeError, match=r"use torch\.func\.grad there"):
            torch.func.vmap(vf.grad(lambda x: x.sum()))(torch.ones(2, 3))
