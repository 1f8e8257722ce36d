"""Gradients for kernels that have no backward of their own: those of another backend."""

import functools
from collections.abc import Callable

import jax


def with_gradients_of(backend: Callable, kernel: Callable) -> Callable:
    """`kernel`, whose gradients are `backend`'s, computed from the same inputs.

    Both take the same arrays, in order, and `num_valid` and the same options by name.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def run(options, num_valid, *arrays):
        return kernel(*arrays, num_valid=num_valid, **dict(options))

    def forward(options, num_valid, *arrays):
        return run(options, num_valid, *arrays), (num_valid, arrays)

    def backward(options, saved, gradients):
        num_valid, arrays = saved
        again = functools.partial(backend, num_valid=num_valid, **dict(options))
        return None, *jax.vjp(again, *arrays)[1](gradients)

    run.defvjp(forward, backward)

    @functools.wraps(kernel)
    def differentiable(*arrays, num_valid=None, **options):
        return run(tuple(options.items()), num_valid, *arrays)

    return differentiable
