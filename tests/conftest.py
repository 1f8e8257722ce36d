"""Settings that must stand before JAX starts, and which tests need torch."""

import os
import pathlib

import pytest

_ORACLES = pathlib.Path(__file__).parent / "oracles"
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    if _DEVICE_COUNT_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_DEVICE_COUNT_FLAG}=8".strip()

    import hypothesis
    import jax

    # An implicit promotion is how bfloat16 work turns into float32 work, or float32 state into
    # bfloat16, without a trace.
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    # Rank promotion stays allowed: weights [D] broadcast over [B, T, D] all through the model, as
    # they do in its equations.
    # Most of a run is compiling, and an unoptimised program computes the same values to rounding in
    # a third of the time. The fixture `optimized` is for tests that need what users run.
    jax.config.update("jax_disable_most_optimizations", True)
    # A second run takes what it compiled from pytest's own cache folder.
    cache = getattr(config, "cache", None)  # absent under -p no:cacheprovider
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache.mkdir("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

    # The same examples on every run, so that a red test is red again; compiling a new shape takes
    # longer than any deadline.
    hypothesis.settings.register_profile(
        "project",
        derandomize=True,
        deadline=None,
        max_examples=int(os.environ.get("HYPOTHESIS_MAX_EXAMPLES", "20")),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("project")


@pytest.fixture
def optimized():
    """Compiles a test's programs as users' programs are: for speed, and for the last digit."""
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Leaves tests/oracles unread unless `-m` asks for it, since reading it imports torch."""
    expression = config.option.markexpr.replace("not oracle", "")
    if collection_path == _ORACLES and "oracle" not in expression:
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _ORACLES in item.path.parents:
            item.add_marker(pytest.mark.oracle)
