"""TPU kernels through the TPU compiler, ahead of time and with no TPU: at the released sizes.

Interpret mode knows nothing of tilings, layouts or the size of VMEM.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import chunk_kda, fp8_matmul, grouped_matmul
from pallas_kernels.dispatch import compile_for, platform


@pytest.fixture(scope="module")
def mesh():
    """A v6e as the compiler sees it: four chips, data x model."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, which has the compiler, is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # other tests may compile at this moment
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        patch.setenv("TPU_ACCELERATOR_TYPE", "v6e-4")
        devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices
    return Mesh(np.array(devices).reshape(2, 2), ("data", "model"))


def compiled(mesh, run, **arguments) -> tuple[int, int]:
    """Compiles run for one argument per name: shape, dtype, mesh axes of the leading dims.

    The number of its kernels, and the bytes that the rest of it needs beside arguments and results.
    """
    specs = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))
        for name, (shape, dtype, *axes) in arguments.items()
    }
    with compile_for("tpu"):
        program = jax.jit(run).lower(**specs).compile()
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None and memory is not None
    return text.count('custom_call_target="tpu_custom_call"'), memory.temp_size_in_bytes


@pytest.mark.parametrize("at_rest", (jnp.bfloat16, jnp.float8_e4m3fn), ids=("bf16", "fp8"))
def test_grouped_matmul_of_local_experts(mesh, at_rest):
    """64 rows with 8 experts each, and 36 experts over four chips; x and weights are not copied."""
    N, E, F, D = 512, 36, 2048, 4096
    experts = ("data", "model")
    arguments = {
        "x": ((N, D), jnp.bfloat16),
        "weights": ((E, F, D), at_rest, experts),
        "group_sizes": ((E,), jnp.int32, experts),
    }
    if at_rest == jnp.float8_e4m3fn:
        arguments["scale"] = ((E, F // 128, D // 128), jnp.float32, experts)

    def run(**kwargs):
        local = jax.shard_map(
            lambda arrays: grouped_matmul(**arrays),
            mesh=mesh,
            in_specs=({name: P(*a[2:]) for name, a in arguments.items()},),
            out_specs=P(None, experts),
            check_vma=False,
        )
        return local(kwargs)

    kernels, extra = compiled(mesh, run, **arguments)
    assert kernels == 1 and extra < 2**20  # x alone has 4 MiB


def test_fp8_matmul(mesh):
    """64 rows and the projection to the queries' latent vectors."""
    N, D, F = 64, 4096, 1536
    one = Mesh(mesh.devices[:1, :1], mesh.axis_names)
    kernels, extra = compiled(
        one,
        lambda x, weight, scale: fp8_matmul(x, weight, scale),
        x=((N, D), jnp.bfloat16),
        weight=((F, D), jnp.float8_e4m3fn),
        scale=((F // 128, D // 128), jnp.float32),
    )
    assert kernels == 1 and extra < 2**20


@pytest.mark.parametrize(("B", "T", "H", "apart"), [(1, 8192, 16, True), (4, 200, 4, False)])
def test_chunk_kda(mesh, B, T, H, apart):
    """Neither form of the inputs is copied; the state is, since it is not donated."""
    K = 128
    one = Mesh(mesh.devices[:1, :1], mesh.axis_names)
    tokens = ((B, T, H, K) if apart else (B, T, H * K), jnp.bfloat16)
    kernels, extra = compiled(
        one,
        functools.partial(chunk_kda, lower_bound=-5.0),
        q=tokens,
        k=tokens,
        v=tokens,
        gate_logits=tokens,
        beta_logits=((B, T, H), jnp.float32),
        A_log=((H,), jnp.float32),
        dt_bias=((H * K,), jnp.float32),
        initial_state=((B, H, K, K), jnp.float32),
        num_valid=((B,), jnp.int32),
    )
    assert kernels == 1
    assert extra <= 0.02 * 4 * 2 * B * T * H * K + 4 * B * H * K * K


def test_a_function_is_traced_again_for_another_platform():
    run = jax.jit(lambda: platform() == "tpu")
    before = bool(run())
    with compile_for("tpu"):
        assert bool(run())
        with compile_for("gpu"):
            assert not bool(run())
    assert bool(run()) == before


def test_compile_for_names_the_platforms():
    with pytest.raises(ValueError, match="platform='tpu7x', expected one of cpu, gpu, tpu"):
        with compile_for("tpu7x"):
            pass
