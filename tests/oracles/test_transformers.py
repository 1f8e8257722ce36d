"""The model and its modules against transformers, from checkpoints that transformers wrote.

Random small models with odd sizes, in float32 as a whole and in bfloat16 module by module. Seeds
are such that no selection is closer than `_CLOSEST`: below that, rounding may turn one, and logits
say nothing. `pytest -rP` shows the measured errors.
"""

import dataclasses
import math
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from glm5next_jax import Glm5NextConfig, forward, generate, init_cache, load
from glm5next_jax.hyper_connections import HyperConnection, Mixing
from glm5next_jax.indexer import KPoolIndexer
from tests.cases import TOLERANCES, relative_l2
from tests.oracles import hf

pytestmark = [pytest.mark.oracle]

# Rounding moves router scores and relative indexer scores of these models by about 1e-6.
_CLOSEST = 3e-4
_KDA, _DSA = "linear_attention", "indexed_attention"


@pytest.fixture(autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quick_compilation():
    """Compiling is most of the time here, and float32 results do not hang on optimisation."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def small_config(**changes: Any) -> Glm5NextConfig:
    """Three layers with sizes that are multiples of little and differ from each other."""
    fields: dict[str, Any] = dict(
        vocab_size=97,
        hidden_size=52,
        num_hidden_layers=3,
        layer_types=(_KDA, _DSA, _KDA),
        mlp_layer_types=("dense", "sparse", "sparse"),
        intermediate_size=72,
        moe_intermediate_size=20,
        num_attention_heads=3,
        q_lora_rank=28,
        kv_lora_rank=36,
        qk_nope_head_dim=20,
        v_head_dim=12,
        index_n_heads=9,  # with few heads relu often zeroes all of them, and pools tie
        index_head_dim=14,
        index_topk=8,
        index_kpool=4,
        linear_num_heads=3,
        linear_head_dim=12,
        n_routed_experts=7,
        num_experts_per_tok=2,
        rms_norm_eps=1e-5,
    )
    return Glm5NextConfig.tiny(**(fields | changes))


@dataclasses.dataclass(frozen=True)
class Case:
    config: Glm5NextConfig
    seed: int
    num_tokens: int
    attention: str = "eager"
    released_names: bool = True


_CASES = {
    "three-heads-pools-of-two": Case(small_config(index_kpool=2), seed=2, num_tokens=61),
    "grouped-routing": Case(
        small_config(
            n_routed_experts=12,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            norm_topk_prob=False,
            routed_scaling_factor=1.7,
            n_shared_experts=2,
        ),
        seed=13,
        num_tokens=53,
    ),
    "clamped-two-streams": Case(
        small_config(
            swiglu_limit=0.3, hc_mult=2, hc_sinkhorn_iters=5, index_kpool=3, index_topk=12
        ),
        seed=21,
        num_tokens=47,
        released_names=False,
    ),
    "softplus-bias-tied": Case(
        small_config(
            linear_lower_bound=None,
            index_kpool=8,
            index_topk=16,
            linear_conv_kernel_dim=3,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
        seed=31,
        num_tokens=83,
        released_names=False,
    ),
    # Before its first whole pool a query sees nothing. There `sdpa` gives zeros, as we do; `eager`
    # gives the mean over all slots, those of later tokens among them.
    "no-tail": Case(
        small_config(index_kpool_always_select_tail=False),
        seed=43,
        num_tokens=57,
        attention="sdpa",
    ),
    "shared-indexer": Case(
        small_config(
            num_hidden_layers=4,
            layer_types=(_KDA, _DSA, _DSA, _KDA),
            mlp_layer_types=("dense", "sparse", "dense", "sparse"),
            indexer_types=("full", "full", "shared", "full"),
            hc_mult=3,
        ),
        seed=51,
        num_tokens=71,
        attention="sdpa",
    ),
}


def loaded(model: Any, case: Case, directory):
    if case.released_names:
        return load(hf.save_released(model, directory))
    return load(hf.save_text_model(model, case.config, directory))


def forward_recording(model, ids: np.ndarray, cache) -> tuple[Any, Any, list[np.ndarray]]:
    """(logits, cache, what every indexer selected, in order) of our model."""
    selections: list[np.ndarray] = []
    indexer = KPoolIndexer.__call__

    def recording(module, *args):
        out = indexer(module, *args)
        jax.debug.callback(lambda ids: selections.append(np.array(ids)), out[0], ordered=True)
        return out

    with mock.patch.object(KPoolIndexer, "__call__", recording):
        logits, cache = forward(model, ids, cache)
        jax.effects_barrier()
    return logits, cache, selections


@pytest.fixture
def measure():
    """Asserts that the largest absolute error is within a bound, and prints it.

    Logits have a standard deviation of about 1, and states are no larger. The largest errors
    measured are 2.1e-5 in logits and 1.0e-5 in states.
    """
    largest: dict[str, float] = {}

    def check(name: str, got: Any, want: np.ndarray, bound: float = 1e-4) -> None:
        got = np.asarray(got)
        assert got.shape == want.shape, name
        error = float(np.abs(got - want).max(initial=0.0))
        largest[name] = max(error, largest.get(name, 0.0))
        assert error <= bound, f"{name}: {error=:.2e}, {bound=:.0e}"

    yield check
    for name, error in largest.items():
        print(name, f"{error:.1e}")


@pytest.mark.parametrize("name", _CASES)
def test_whole_prompt(name, tmp_path, measure, quick_compilation):
    case = _CASES[name]
    theirs = hf.random_model(case.config, case.seed, case.attention)
    ours = loaded(theirs, case, tmp_path / "checkpoint")
    ids = hf.token_ids(case.config, case.seed, (2, case.num_tokens))
    with hf.Decisions(theirs) as decisions:
        want, kept = hf.run(theirs, ids)
    print("index_margin", f"{decisions.index_margin:.1e}")
    print("router_margin", f"{decisions.router_margin:.1e}")
    print("logits_std", f"{want.std():.2f}")
    assert decisions.index_margin > _CLOSEST and decisions.router_margin > _CLOSEST
    assert 0.5 < want.std() < 2

    capacity = case.num_tokens + 6  # slots that stay empty must not be seen
    cache = init_cache(ours.config, 2, capacity)
    logits, cache, selections = forward_recording(ours, ids, cache)
    measure("logits", logits, want)
    hf.compare_states(cache, kept, theirs, measure)

    for selection, visible in zip(selections, decisions.visible, strict=True):
        np.testing.assert_array_equal(hf.visible_tokens(selection, case.config), visible)
        assert visible[:, -1].sum() < case.num_tokens, "every token was selected"


def test_chunks_then_single_tokens(tmp_path, measure, quick_compilation):
    """The same cuts on both sides; ours runs them in buckets of 29 tokens, padded."""
    case = Case(small_config(index_kpool=3, index_topk=9), seed=64, num_tokens=29 + 17 + 2 + 5)
    theirs = hf.random_model(case.config, case.seed)
    ours = loaded(theirs, case, tmp_path / "checkpoint")
    ids = hf.token_ids(case.config, case.seed, (2, case.num_tokens))
    cache, kept, start = init_cache(ours.config, 2, case.num_tokens), None, 0
    with hf.Decisions(theirs) as decisions:
        for size in (29, 17, 2, 1, 1, 1, 1, 1):
            chunk = ids[:, start : start + size]
            want, kept = hf.run(theirs, chunk, kept)
            padding = 29 - size if size > 1 else 0
            padded = np.pad(chunk, ((0, 0), (0, padding)), constant_values=-1)
            num_valid = np.full((2,), size, np.int32)
            logits, cache = forward(ours, padded, cache, num_valid)
            assert logits is not None
            phase = "prefill" if size > 1 else "decode"
            measure(f"{phase} logits", logits[:, :size], want)
            hf.compare_states(cache, kept, theirs, measure)
            start += size
    assert start == case.num_tokens
    assert decisions.index_margin > _CLOSEST and decisions.router_margin > _CLOSEST


def test_greedy_generation(tmp_path, quick_compilation):
    """Two ragged prompts, padded on the left on their side, 20 tokens."""
    case = Case(small_config(), seed=70, num_tokens=37)
    theirs = hf.random_model(case.config, case.seed)
    ours = loaded(theirs, case, tmp_path / "checkpoint")
    lengths, new = (37, 22), 20
    ids = hf.token_ids(case.config, case.seed, (2, max(lengths)))
    prompts = [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]
    padded = np.zeros((2, max(lengths)), np.int64)
    mask = np.zeros_like(padded)
    for row, prompt in enumerate(prompts):
        padded[row, -len(prompt) :] = prompt
        mask[row, -len(prompt) :] = 1
    generated = theirs.generate(
        torch.from_numpy(padded),
        attention_mask=torch.from_numpy(mask),
        max_new_tokens=new,
        do_sample=False,
    )
    want = hf.array(generated)[:, max(lengths) :]

    closest = math.inf
    with hf.Decisions(theirs) as decisions:
        for prompt, answer in zip(prompts, want, strict=True):
            logits, _ = hf.run(theirs, np.array([prompt + answer.tolist()]))
            best = np.sort(logits[0, len(prompt) - 1 : -1], axis=-1)
            closest = min(closest, float((best[:, -1] - best[:, -2]).min()))
    print("token_margin", f"{closest:.1e}")
    print("index_margin", f"{decisions.index_margin:.1e}")
    print("router_margin", f"{decisions.router_margin:.1e}")
    assert closest > 1e-3
    assert decisions.index_margin > _CLOSEST and decisions.router_margin > _CLOSEST

    completions = generate(ours, prompts, max_new_tokens=new, eos_token_ids=[])
    assert [list(c.token_ids) for c in completions] == want.tolist()


_BF16 = small_config(
    hidden_size=96,
    num_hidden_layers=2,
    layer_types=(_KDA, _DSA),
    mlp_layer_types=("dense", "sparse"),
    moe_intermediate_size=24,  # grouped_mm of torch wants rows of whole 16 bytes
    linear_head_dim=32,
    kv_lora_rank=48,
    qk_nope_head_dim=32,
    v_head_dim=24,
    index_topk=16,
    dtype="bfloat16",
)
_SHAPE = (2, 61, _BF16.hidden_size)


@pytest.fixture(scope="module")
def trio(tmp_path_factory) -> hf.Trio:
    model = hf.random_model(_BF16, seed=8)
    hf.to_bfloat16(model)
    path = hf.save_released(model, tmp_path_factory.mktemp("bfloat16"))

    return hf.Trio.read(path, load(path, dtype="bfloat16"))


def call(function, module, *args):
    """function(module, *args) under jit, the module's weights as arguments."""
    leaves, treedef = jax.tree.flatten(module)
    run = jax.jit(lambda leaves, *args: function(jax.tree.unflatten(treedef, leaves), *args))
    return run(leaves, *args)


def all_valid(x: torch.Tensor) -> jax.Array:
    return jnp.full((x.shape[0],), x.shape[1], jnp.int32)


@pytest.fixture
def closer():
    """Asserts that ours is near theirs, and as near to the float32 result as theirs is."""

    def check(name: str, ours: Any, theirs: Any, exact: Any, rows: Any = ...) -> None:
        got, want, truth = (
            (np.asarray(a.astype(jnp.float32)) if isinstance(a, jax.Array) else hf.array(a))[rows]
            for a in (ours, theirs, exact)
        )
        assert got.shape == want.shape == truth.shape
        between = relative_l2(got, want)
        own, other = relative_l2(got, truth), relative_l2(want, truth)
        print(name, f"between {between:.2e}, own {own:.2e}, theirs {other:.2e}")
        assert between <= TOLERANCES[name, "bfloat16"], f"{name}: {between=:.2e}"
        assert own <= 1.2 * other + 1e-6, f"{name}: {own=:.2e}, {other=:.2e}"

    return check


def _recurrent_state(cache: Any) -> torch.Tensor:
    return cache.layers[0].recurrent_states[0]


@torch.no_grad()
def test_kda_layer(trio, closer):
    x = hf.stored(0, _SHAPE)
    ours, theirs, exact = trio.of("layers.0.self_attn")

    def run(module, x):
        cache = transformers.DynamicCache(config=trio.theirs.config)
        return module(x, cache=cache), _recurrent_state(cache)

    cache = init_cache(_BF16, *_SHAPE[:2]).layers[0]
    y, state = call(lambda m, *args: m(*args), ours, hf.to_jax(x), cache, all_valid(x))
    (want, want_state), (truth, true_state) = run(theirs, x), run(exact, x.float())
    closer("kda_layer", y, want, truth)
    closer("kda_layer.state", state.recurrent_state, want_state, true_state)


@pytest.mark.parametrize("num_tokens", [19, 61])
@torch.no_grad()
def test_sparse_attention_layer(trio, closer, num_tokens):
    """19 tokens: a query sees all before it. 61: where the indexer has to choose.

    In bfloat16 an indexer's scores are good to about 1 %. A query whose closest decision is nearer
    than 4 % of its largest score may see other tokens, and is left out.
    """
    x = hf.stored(1, _SHAPE)[:, :num_tokens]
    ours, theirs, exact = trio.of("layers.1.self_attn")

    def run(module, x):
        cache = transformers.DynamicCache(config=trio.theirs.config)
        mask = torch.ones(x.shape[:2], dtype=torch.bool)
        with hf.Decisions(module) as decisions:
            y, _, _ = module(x, attention_mask=mask, cache=cache)
        return y, decisions

    cache = init_cache(_BF16, *x.shape[:2]).layers[1]
    start = jnp.zeros((2,), jnp.int32)
    y, _, pool_ids = call(
        lambda m, *args: m(*args, None), ours, hf.to_jax(x), cache, start, all_valid(x)
    )
    (want, their_choice), (truth, true_choice) = run(theirs, x), run(exact, x.float())
    margin = true_choice.index_margins[0]
    safe = margin > 0.04
    chosen = np.isfinite(margin)
    if num_tokens == 19:
        assert not chosen.any()
    else:
        print("safe queries", f"{(safe & chosen).sum()} of {chosen.sum()}")
        assert (safe & chosen).sum() > 20
    for choice in (hf.visible_tokens(pool_ids, _BF16), their_choice.visible[0]):
        np.testing.assert_array_equal(choice[safe], true_choice.visible[0][safe])
    closer("dsa_layer", y, want, truth, rows=safe)


@torch.no_grad()
def test_moe(trio, closer):
    x = hf.stored(2, _SHAPE)
    ours, theirs, exact = trio.of("layers.1.mlp")
    y = call(lambda m, *args: m(*args), ours, hf.to_jax(x), all_valid(x))
    closer("moe", y, theirs(x), exact(x.float()))


@torch.no_grad()
def test_router(trio, closer):
    x = hf.stored(3, _SHAPE).flatten(0, 1)
    ours, theirs, exact = trio.of("layers.1.mlp.gate")
    with hf.Decisions(exact) as decisions:
        _, true_weights, true_experts = exact(x.float())
    assert decisions.router_margin > _CLOSEST
    _, want_weights, want_experts = theirs(x)
    experts, weights = call(lambda m, x: m(x), ours, hf.to_jax(x))

    def scattered(experts: Any, weights: Any) -> torch.Tensor:
        """[N, E]: the order among the chosen experts means nothing."""
        dense = torch.zeros(len(x), _BF16.n_routed_experts)
        return dense.scatter_(1, experts, weights)

    mine = scattered(
        torch.from_numpy(np.array(experts)).long(), torch.from_numpy(np.array(weights))
    )
    closer(
        "router",
        mine,
        scattered(want_experts, want_weights),
        scattered(true_experts, true_weights),
    )


@torch.no_grad()
def test_dense_mlp(trio, closer):
    x = hf.stored(4, _SHAPE)
    ours, theirs, exact = trio.of("layers.0.mlp")
    closer("swiglu", call(lambda m, x: m(x), ours, hf.to_jax(x)), theirs(x), exact(x.float()))


@torch.no_grad()
def test_hyper_connection_pre(trio, closer):
    streams = hf.stored(5, (*_SHAPE[:2], _BF16.hc_mult, _BF16.hidden_size), scale=2.0)
    ours, theirs, exact = trio.of("layers.0.attn_hc")
    collapsed, mixing = call(HyperConnection.pre, ours, hf.to_jax(streams))
    want, truth = theirs(streams), exact(streams.float())
    closer("hc_pre.post", mixing.post, want[0], truth[0])
    closer("hc_pre.comb", mixing.comb, want[1], truth[1])
    closer("hc_pre", collapsed, want[2], truth[2])


@torch.no_grad()
def test_hyper_connection_post(trio, closer):
    """The reference's post step is part of its decoder layer, so the layer runs around constants.

    What enters its second hyper-connection is the result of the first one's post step.
    """
    streams = hf.stored(6, (*_SHAPE[:2], _BF16.hc_mult, _BF16.hidden_size), scale=2.0)
    y = hf.stored(7, _SHAPE)
    ours, theirs, exact = trio.of("layers.0")
    post, comb, collapsed = theirs.attn_hc(streams)

    def run(layer, dtype):
        seen = []
        handle = layer.ffn_hc.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        mixed = (post, comb, collapsed.to(dtype))
        with (
            mock.patch.object(layer.attn_hc, "forward", lambda _: mixed),
            mock.patch.object(layer.self_attn, "forward", lambda **_: y.to(dtype)),
        ):
            layer(streams.to(dtype))
        handle.remove()
        return seen[0]

    want, truth = run(theirs, torch.bfloat16), run(exact, torch.float32)
    mixing = Mixing(hf.to_jax(post), hf.to_jax(comb))
    got = call(HyperConnection.post, ours.attn_hc, hf.to_jax(streams), hf.to_jax(y), mixing)
    closer("hc_post", got, want, truth)


@torch.no_grad()
def test_rms_norm(trio, closer):
    x = hf.stored(8, _SHAPE, scale=3.0)
    ours, theirs, exact = trio.of("layers.0.input_layernorm")
    closer("rms_norm", call(lambda m, x: m(x), ours, hf.to_jax(x)), theirs(x), exact(x.float()))


@torch.no_grad()
def test_gated_rms_norm(trio, closer):
    shape = (*_SHAPE[:2], _BF16.linear_num_heads, _BF16.linear_head_dim)
    x, gate = hf.stored(9, shape, scale=0.2), hf.stored(10, shape)
    ours, theirs, exact = trio.of("layers.0.self_attn.o_norm")
    got = call(lambda m, *args: m(*args), ours, hf.to_jax(x), hf.to_jax(gate))
    closer("gated_rms_norm", got, theirs(x, gate), exact(x.float(), gate.float()))


@torch.no_grad()
def test_layer_norm(trio, closer):
    x = hf.stored(11, (*_SHAPE[:2], _BF16.index_head_dim), scale=2.0)
    ours, theirs, exact = trio.of("layers.1.self_attn.indexer.k_norm")
    closer("layer_norm", call(lambda m, x: m(x), ours, hf.to_jax(x)), theirs(x), exact(x.float()))
