"""Which backend runs an op, and the argument checks and padding helpers that every op shares.

Each op keeps a plain dict from backend name to function. A backend that the caller names either
runs or raises; only the automatic choice may fall back.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

Backend = Literal["reference", "xla", "pallas_mosaic_tpu", "pallas_mosaic_gpu"]
BACKENDS: tuple[str, ...] = ("reference", "xla", "pallas_mosaic_tpu", "pallas_mosaic_gpu")

# Best first. `reference` is an oracle, slow on purpose, so it is never chosen automatically.
AUTOMATIC_ORDER: dict[str, tuple[str, ...]] = {
    "tpu": ("pallas_mosaic_tpu", "xla"),
    "gpu": ("pallas_mosaic_gpu", "xla"),
    "cpu": ("xla",),
}

# FP8 weights have one factor per square of this many rows and columns, the last ones cut short.
SCALE_BLOCK = 128

# Part of the key of jit's caches, so that a function traced for one platform is traced again for
# another.
_compiled_for = jax.make_user_context(None)

_logger = logging.getLogger(__name__)
_logged: set[tuple[str, str, str]] = set()


def platform() -> str:
    """The platform that the automatic choice is made for: where JAX puts new computations, or what
    `compile_for` names."""
    return _compiled_for.value or jax.default_backend()


@contextlib.contextmanager
def compile_for(platform: str) -> Iterator[None]:
    """Makes every automatic choice as on `platform` ("cpu", "gpu" or "tpu"), for the ahead-of-time
    compilation of programs that run elsewhere.

    It does not choose the compiler: that is for the devices of the arguments' shardings.

    Raises:
        ValueError: there is no such platform.
    """
    if platform not in AUTOMATIC_ORDER:
        raise ValueError(
            f"compile_for: {platform=}, expected one of {', '.join(sorted(AUTOMATIC_ORDER))}"
        )
    with _compiled_for(platform):
        yield


def dispatch(
    op: str, backends: Mapping[str, Callable], backend: str | None, *args: Any, **kwargs: Any
) -> Any:
    """Runs `op` on `backend`, or on the best of `backends` for the current platform where `backend`
    is None.

    Raises ValueError if `backend` is no backend name at all. Raises NotImplementedError if the
    named backend lacks the op or cannot do this call, or if no automatic candidate can. Automatic
    candidates that raise NotImplementedError are skipped, with one warning per (op, backend,
    reason); a candidate that the op never had is passed over silently.
    """
    if backend is not None:
        if backend not in BACKENDS:
            raise ValueError(
                f"{op}: unknown {backend=}, expected None or one of {', '.join(BACKENDS)}"
            )
        if backend not in backends:
            raise NotImplementedError(
                f"{op} has no backend {backend}; it has {', '.join(backends)}"
            )
        return backends[backend](*args, **kwargs)
    refusals = []
    candidates = AUTOMATIC_ORDER.get(platform(), ("xla",))
    for candidate in candidates:
        if candidate not in backends:
            continue
        try:
            return backends[candidate](*args, **kwargs)
        except NotImplementedError as error:
            reason = str(error)
        refusals.append(f"{candidate}: {reason}")
        if candidate != candidates[-1] and (op, candidate, reason) not in _logged:
            _logged.add((op, candidate, reason))
            _logger.warning("%s: backend %s is skipped: %s", op, candidate, reason)
    detail = "; ".join(refusals) or f"it has {', '.join(backends)}"
    raise NotImplementedError(
        f"{op}: no automatic backend on {platform()} can do this call ({detail})"
    )


def check_array(
    op: str,
    name: str,
    array: Any,
    dims: tuple[str | int, ...],
    sizes: dict[str, int],
    dtype: Any = "floating",
) -> None:
    """Checks rank, shape and dtype of one argument; raises ValueError naming the argument, what was
    found and what was expected.

    `dims` holds a letter or a number per axis. A letter seen for the first time is bound in `sizes`
    (which this function fills); later uses must agree. `dtype` is "floating" for any float type,
    else one dtype.
    """
    shape, found = getattr(array, "shape", None), getattr(array, "dtype", None)
    if shape is None or found is None:
        raise ValueError(f"{op}: {name} is a {type(array).__name__}, expected an array")
    letters = "[" + ", ".join(str(d) for d in dims) + "]"
    if len(shape) != len(dims):
        raise ValueError(
            f"{op}: {name}.shape={tuple(shape)} has rank {len(shape)}, expected {letters}"
        )
    expected = tuple(
        d if isinstance(d, int) else sizes.setdefault(d, n)
        for d, n in zip(dims, shape, strict=True)
    )
    if tuple(shape) != expected:
        raise ValueError(f"{op}: {name}.shape={tuple(shape)}, expected {letters} = {expected}")
    right = (
        jnp.issubdtype(found, jnp.floating) if isinstance(dtype, str) else found == jnp.dtype(dtype)
    )
    if not right:
        wanted = "a floating dtype" if isinstance(dtype, str) else jnp.dtype(dtype).name
        raise ValueError(f"{op}: {name}.dtype={jnp.dtype(found).name}, expected {wanted}")


def check_scale(
    op: str, weights: Any, scale: Any, dims: tuple[str, ...], sizes: dict[str, int]
) -> None:
    """Checks that float8_e4m3fn weights have a factor per block, and others none.

    `weights` has been checked and has the axes `dims`; all but the last two are the scale's too.
    """
    codes = jnp.dtype(weights.dtype)
    if codes.itemsize > 1:
        if scale is not None:
            raise ValueError(
                f"{op}: scale is given with weights.dtype={codes.name}, expected scale=None or "
                "weights in float8_e4m3fn"
            )
        return
    if codes != jnp.float8_e4m3fn:
        raise ValueError(f"{op}: weights.dtype={codes.name}, expected float8_e4m3fn or wider")
    if scale is None:
        raise ValueError(f"{op}: scale=None with weights in float8_e4m3fn, expected their factors")
    blocks = tuple(-(-sizes[d] // SCALE_BLOCK) for d in dims[-2:])
    check_array(op, "scale", scale, dims[:-2] + blocks, sizes, jnp.float32)


def count_valid(num_valid: jax.Array | None, batch: int, length: int) -> jax.Array:
    """The number of real tokens per row, [B] int32 within 0..length; None means all."""
    if num_valid is None:
        return jnp.full((batch,), length, jnp.int32)
    return jnp.clip(num_valid, 0, length)


def zero_padding(x: jax.Array, num_valid: jax.Array | None) -> jax.Array:
    """x [B, T, ...] with zeros at t >= num_valid[b].

    It selects, so NaN in the padding reaches neither values nor gradients.
    """
    if num_valid is None:
        return x
    valid = jnp.arange(x.shape[1], dtype=jnp.int32) < num_valid[:, None]  # [B, T]
    return jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))
