"""What DTensor finds out about an operation, kept from one training of a process to the next.

How the results of an operation are split follows from how its operands are, and takes DTensor tens of milliseconds to
find: half of the time of a training of a few steps in slices. It remembers that itself, but with the groups of ranks of
that training, which the next one has not.
"""

import copy
from typing import Any

from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._api import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import LocalLRUCache, ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils import _pytree as pytree

# By what DTensor compares: the operation, and shapes, types and splits of its operands over the ranks of a mesh.
_found: dict[OpSchema, OutputSharding] = {}
_new: list[OpSchema] = []  # of this training


def keep() -> None:
    """From now on, find out each once."""
    find = ShardingPropagator.propagate_op_sharding_non_cached

    def look_up(self: ShardingPropagator, schema: OpSchema) -> OutputSharding:
        mesh = next((spec.mesh for spec in _specs(schema)), None)
        if mesh is None or _are_we_tracing():
            return find(self, schema)
        if schema not in _found:
            _found[schema] = find(self, schema)
            _new.append(schema)
        return _on(mesh, _found[schema])

    ShardingPropagator.propagate_op_sharding_non_cached = look_up  # type: ignore[method-assign]
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding = LocalLRUCache(propagator.propagate_op_sharding_non_cached)


def forget_groups() -> None:
    """Before another training: let go of the groups of the last one, whose connections else stay open."""
    _clear_sharding_prop_cache()
    for schema in _new:
        sharding = _found[schema]
        for spec in (*_specs(schema), *_specs(sharding.redistribute_schema), *_specs(sharding.output_spec)):
            for mesh in (spec.mesh, spec.mesh._get_root_mesh()):
                mesh._pg_registry = {}
    _new.clear()


def _specs(of: Any) -> list[DTensorSpec]:
    """All in a schema, or in what an operation returns."""
    parts = (of.args_schema, of.kwargs_schema) if isinstance(of, OpSchema) else of
    return [leaf for leaf in pytree.tree_leaves(parts) if isinstance(leaf, DTensorSpec)]


def _on(mesh: DeviceMesh, sharding: OutputSharding) -> OutputSharding:
    """The same over a mesh of the same ranks."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, DTensorSpec):
            leaf = copy.copy(leaf)
            leaf.mesh = mesh
        return leaf

    schema = sharding.redistribute_schema
    if schema:
        parts = pytree.tree_map(move, (schema.args_schema, schema.kwargs_schema))
        schema = OpSchema(schema.op, *parts, schema.schema_info)
    return OutputSharding(
        pytree.tree_map(move, sharding.output_spec),
        schema,
        sharding.needs_redistribute,
        sharding.use_val_from_redistribute_schema,
    )
