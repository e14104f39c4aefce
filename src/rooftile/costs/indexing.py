"""Embeddings, gathers, scatters and ordering: bytes of the elements touched, never of the whole table."""

from __future__ import annotations

from rooftile.capture.trace import Call, TensorMeta, tensors_in
from rooftile.costs.operands import bytes_of, is_in_place, reads, split_operator, tensor, total_bytes, writes
from rooftile.costs.record import Cost
from rooftile.costs.registry import aten, formula

__all__: list[str] = []


def _touched(table: TensorMeta, elements: int) -> int:
    """Bytes of ``elements`` looked up in ``table``: repeats come from the cache, so at most the whole table."""
    return min(elements * table.itemsize, bytes_of(table))


@formula("aten.embedding", zero_reason="lookup")
def embedding(call: Call) -> Cost:
    """Rows of the weight, one per index, go to the output: gathered rows and indices read, no arithmetic."""
    weight, indices = tensor(call, 0, "weight"), tensor(call, 1, "indices")
    read = _touched(weight, indices.numel * weight.shape[-1]) + bytes_of(indices)
    return Cost("embedding", 0, read, total_bytes(call.outputs), zero_reason="lookup")


@formula("aten.embedding_dense_backward")
def embedding_backward(call: Call) -> Cost:
    """Each incoming row is added to its row of a dense gradient, written whole: one addition per incoming element."""
    grad = tensor(call, 0, "grad_output")
    return Cost("embedding", grad.numel, total_bytes(reads(call)), total_bytes(call.outputs))


@formula("aten._embedding_bag", "aten._embedding_bag_forward_only")
def embedding_bag(call: Call) -> Cost:
    """Gathered rows summed (or compared) into bags: 1 per gathered element, 2 with weights per sample."""
    weight, indices = tensor(call, 0, "weight"), tensor(call, 1, "indices")
    gathered = indices.numel * weight.shape[-1]
    weighted = isinstance(call.argument(6, "per_sample_weights"), TensorMeta)
    read = total_bytes(reads(call)) - bytes_of(weight) + _touched(weight, gathered)
    return Cost("embedding", (1 + weighted) * gathered, read, total_bytes(call.outputs))


#: name -> position of the mode; the weights per sample stand ``shift`` places after it.
_BAG_BACKWARD = {"aten._embedding_bag_dense_backward": (7, 1), "aten._embedding_bag_backward": (8, 2)}


@formula(*_BAG_BACKWARD)
def embedding_bag_backward(call: Call) -> Cost:
    """Each bag's gradient is added to the rows of its samples: 1 per gathered element, 2 with weights or for a mean."""
    grad, indices = tensor(call, 0, "grad"), tensor(call, 1, "indices")
    mode_at, shift = _BAG_BACKWARD[call.operator.rsplit(".", 1)[0]]
    weighted = isinstance(call.argument(mode_at + shift, "per_sample_weights"), TensorMeta)
    scaled = weighted or call.argument(mode_at, "mode", 0) == 1
    flops = (1 + scaled) * indices.numel * grad.shape[-1]
    return Cost("embedding", flops, total_bytes(reads(call)), total_bytes(call.outputs))


@formula(
    *aten("index_select gather index _unsafe_index take take_along_dim masked_select"),
    zero_reason="gather",
)
def gather(call: Call) -> Cost:
    """As many elements of the source as the output has, and the indices (a boolean mask is read whole)."""
    source = call.inputs[0]
    indices = total_bytes(reads(call)[1:])
    output = sum(meta.numel for meta in call.outputs)
    return Cost("indexing", 0, _touched(source, output) + indices, total_bytes(call.outputs), zero_reason="gather")


#: Scatters: whether the values are added (or otherwise combined) rather than stored.
_COMBINES = {
    "scatter": False, "index_put": False, "_index_put_impl": False, "_unsafe_index_put": False, "index_copy": False,
    "index_fill": False, "masked_scatter": False, "put": False,
    "scatter_add": True, "scatter_reduce": True, "index_add": True, "index_reduce": True,
}  # fmt: skip


@formula(*(f"aten.{name}" for name in _COMBINES))
def scatter(call: Call) -> Cost:
    """Values go to the places that the indices name; in place only those are touched, otherwise self is copied first.

    Combining reads each place and takes one FLOP per value; storing takes none.
    """
    base = split_operator(call.operator)[1]
    name = base.rstrip("_") if base != "_index_put_impl_" else "_index_put_impl"
    accumulate = bool(call.argument(3, "accumulate", False)) if "put" in name else False
    reduce = call.argument(4, "reduce") if name == "scatter" else None
    combines = _COMBINES[name] or accumulate or reduce is not None
    target = call.inputs[0]
    placed = _placed(call, name, target)
    touched = _touched(target, placed)
    others = total_bytes(reads(call)[1:])
    if is_in_place(base):
        read, written = others + touched * combines, touched
    else:
        read, written = others + bytes_of(target), total_bytes(call.outputs)
    return Cost("indexing", placed * combines, read, written, zero_reason="" if combines else "scatter")


def _placed(call: Call, name: str, target: TensorMeta) -> int:
    """How many elements are placed: the values' or, where one value is spread, the indexed region's."""
    if name in ("scatter", "scatter_add", "scatter_reduce", "put"):
        return tensor(call, 1 if name == "put" else 2, "index").numel
    if name in ("index_copy", "index_add", "index_reduce", "index_fill"):
        size = target.shape[call.args[1]] if target.shape else 1
        return target.numel // size * tensor(call, 2, "index").numel if size else 0
    if name == "masked_scatter":
        return min(target.numel, tensor(call, 2, "source").numel)
    indices = list(tensors_in((call.argument(1, "indices"),)))
    if any(meta.dtype == "bool" for meta in indices):
        values = tensor(call, 2, "values").numel  # how many are selected is data; all of the values, or all places
        return values if values > 1 else target.numel
    # Advanced indexing: the indices broadcast together replace the dimensions that they index.
    broadcast = _broadcast_numel([meta.shape for meta in indices])
    kept = 1
    given = call.argument(1, "indices")
    for dimension, size in enumerate(target.shape):
        if dimension >= len(given) or given[dimension] is None:
            kept *= size
    return broadcast * kept


def _broadcast_numel(shapes: list[tuple[int, ...]]) -> int:
    total = 1
    for offset in range(1, max((len(shape) for shape in shapes), default=0) + 1):
        sizes = [shape[-offset] for shape in shapes if len(shape) >= offset]
        total *= next((size for size in sizes if size != 1), 1)
    return total


@formula(
    *aten(
        "sort argsort topk kthvalue nonzero searchsorted bucketize unique_dim _unique2 unique_consecutive "
        "nonzero_static one_hot"
    ),
    zero_reason="ordering",
)
def ordering(call: Call) -> Cost:
    """Comparisons and moves of keys, no arithmetic (radix sort compares nothing): one pass over input and output.

    A real sort makes several passes; this is the least.
    """
    return Cost("indexing", 0, total_bytes(reads(call)), total_bytes(writes(call)), zero_reason="ordering")
