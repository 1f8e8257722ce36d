"""docs/names.md is what the table gives, and agrees with what the released checkpoints hold."""

import pytest

from convert import components, names_page
from glm5next_jax.checkpoint import mapping, planning
from glm5next_jax.checkpoint.mapping import Name
from glm5next_jax.checkpoint.safetensors_reader import TensorInfo
from glm5next_jax.config import Glm5NextConfig
from glm5next_jax.model import param_specs
from tests.checkpoint.test_mapping import manifest
from tests.source_tree import ROOT

OTHERS = [r for r in mapping.RULES if components.spelling_of(r.source) != components.RELEASED]


def test_the_page_is_what_the_generator_makes():
    written = (ROOT / "docs" / "names.md").read_text()
    assert written == names_page.page() + "\n", "run python -m convert.names_page > docs/names.md"


def test_every_rule_and_every_leaf_stand_on_it():
    lines = names_page.page().splitlines()
    for rule in mapping.RULES:
        assert any(line.startswith(f"| `{rule.source}` | ") for line in lines), rule
    config = names_page.few_layers(extras=True)
    leaves = {Name.of(leaf).generic for leaf in param_specs(config, fp8=True)}
    leaves |= {Name.of(leaf).generic for leaf in param_specs(Glm5NextConfig.tiny())}
    for leaf in leaves:
        assert any(line.startswith(f"| `{leaf.removesuffix('_scale_inv')}`") for line in lines)
    for reason in (
        planning.MTP_REASON, planning.VISION_REASON, planning.TIED_REASON,
        planning.ACTIVATION_REASON,
    ):  # fmt: skip
        assert any(line.endswith(f"| {reason} |") for line in lines)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_released_shapes_and_dtypes(kind):
    config = Glm5NextConfig.glm53_flash()
    rows = {(row.component, row.rule.source): row for row in names_page.rows()}
    seen = set()
    for info in manifest(kind):
        name = Name.of(mapping.without_prefix(info.name))
        is_text = name.layer is None or name.layer < config.num_hidden_layers
        if "visual" in info.name or not is_text or info.name.endswith("_scale_inv"):
            continue
        key = (components.component_of(name, config), name.generic)
        row = rows[key]
        assert (row.shape, row.dtypes[kind == "fp8"]) == (info.shape, info.dtype), info.name
        seen.add(key)
    assert seen == {key for key, row in rows.items() if row.dtypes[0]}


def test_leaf_shapes_in_letters():
    for leaf in names_page.leaves().values():
        sizes = tuple(names_page.size_of(letters, leaf.component) for letters in leaf.letters)
        assert sizes == leaf.shape, leaf


def slots(rule) -> set[str]:
    """What a rule fills, a whole leaf as its parts."""
    found = set()
    for target in rule.targets:
        leaf, _, part = target.partition("[")
        parts = {
            t.partition("[")[2]
            for r in mapping.RULES
            for t in r.targets
            if t.startswith(leaf + "[")
        }
        found |= {f"{leaf}[{each}" for each in ({part} if part else parts or {""})}
    return found


@pytest.mark.parametrize("preferred", OTHERS, ids=lambda rule: rule.source)
def test_shapes_of_other_names_are_those_that_are_read(preferred):
    """A checkpoint with one name that is not released, of the shape on the page, is accepted."""
    config = names_page.few_layers(extras=True).replace(n_routed_experts=16)
    specs = param_specs(config)
    tensors = []
    for layer in [None, *range(config.num_hidden_layers)]:
        taken = set()
        for rule in (preferred, *mapping.RULES):
            if ("{L}" in rule.source) == (layer is None) or slots(rule) & taken:
                continue
            for row in names_page.rows():
                leaf = row.leaves[0].generic.replace("{L}", str(layer))
                here = components.component_of(Name.of(leaf), config)
                if row.rule is not rule or row.component != here or leaf not in specs:
                    continue
                taken |= slots(rule)
                name = rule.source.replace("{L}", str(layer))
                shape = tuple(16 if n == 288 else n for n in row.shape)
                experts = range(16) if "{E}" in name else [0]
                tensors += [
                    TensorInfo(name.replace("{E}", str(expert)), "BF16", shape, "file")
                    for expert in experts
                ]
    assert any(Name.of(info.name).generic == preferred.source for info in tensors)
    planning.plan(tensors, config, specs)
