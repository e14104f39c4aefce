"""Operators that compute nothing: views, copies, casts, creation. Each says why it is 0 FLOP."""

from __future__ import annotations

from rooftile.capture.trace import Call
from rooftile.costs.operands import reads, tensor, total_bytes, writes
from rooftile.costs.record import Cost
from rooftile.costs.registry import aten, formula

__all__: list[str] = []


@formula(
    *aten(
        "view _unsafe_view _reshape_alias reshape_as view_as expand expand_as t transpose permute swapaxes swapdims "
        "movedim adjoint numpy_T mT slice select narrow split split_with_sizes unsafe_split unsafe_split_with_sizes"
        " chunk unbind unsqueeze squeeze flatten "
        "unflatten as_strided diagonal unfold detach alias lift_fresh view_as_real view_as_complex real imag _conj "
        "_neg_view resolve_conj resolve_neg values indices crow_indices col_indices ccol_indices row_indices _values "
        "_indices _coalesced_ broadcast_to requires_grad_ positive tensor_split hsplit vsplit dsplit "
        "_nested_view_from_buffer data resize_as_"
    ),
    zero_reason="view",
)
def view(call: Call) -> Cost:  # noqa: ARG001
    """New sizes and strides over the same storage: nothing moves."""
    return Cost("view", 0, 0, 0, zero_reason="view")


@formula(
    *aten(
        "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize set_ _efficientzerotensor "
        "_empty_affine_quantized"
    ),
    zero_reason="allocation",
)
def allocation(call: Call) -> Cost:  # noqa: ARG001
    """Memory is reserved and not touched."""
    return Cost("creation", 0, 0, 0, zero_reason="allocation")


@formula(
    *aten(
        "zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full fill zero scalar_tensor eye arange "
        "linspace logspace _foreach_zero tril_indices triu_indices"
    ),
    zero_reason="fill",
)
def fill(call: Call) -> Cost:
    """Every element of the output is written; the tensor that lent its shape is not read."""
    # fill_(x, value) with a 0-dim tensor reads that value; the shape donor of *_like is no read.
    return Cost("creation", 0, 0, total_bytes(writes(call)), zero_reason="fill", elementwise=True)


@formula(
    *aten(
        "rand randn randint randperm rand_like randn_like randint_like uniform normal random exponential geometric "
        "log_normal cauchy bernoulli multinomial poisson binomial _standard_gamma normal_functional"
    ),
    zero_reason="random",
)
def random(call: Call) -> Cost:
    """Random bits are integer work: written, and a tensor of probabilities read; the shape donor of *_like is not."""
    donor = "_like" in call.operator or "rand" in call.operator
    return Cost(
        "creation",
        0,
        0 if donor else total_bytes(reads(call)),
        total_bytes(writes(call)),
        zero_reason="random",
        elementwise="_." in call.operator or donor,
    )


@formula(
    *aten("_to_copy clone lift_fresh_copy copy _foreach_copy _foreach_clone lift contiguous to type_as"),
    zero_reason="copy",
)
def copy(call: Call) -> Cost:
    """Read once, written once; a change of dtype on the way costs nothing more (conversion units)."""
    source, target = reads(call), writes(call)
    same_dtype = all(a.dtype == b.dtype for a, b in zip(source, target, strict=False))
    return Cost(
        "copy",
        0,
        total_bytes(source),
        total_bytes(target),
        zero_reason="copy" if same_dtype else "cast",
        elementwise=True,
    )


@formula(
    *aten(
        "cat concat concatenate stack hstack vstack repeat tile roll flip rot90 constant_pad_nd pad reflection_pad1d "
        "reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d block_diag "
        "repeat_interleave channel_shuffle pixel_shuffle pixel_unshuffle native_channel_shuffle im2col diag_embed "
        "view_copy permute_copy transpose_copy t_copy expand_copy slice_copy select_copy unsqueeze_copy squeeze_copy "
        "split_copy split_with_sizes_copy unbind_copy as_strided_copy diagonal_copy alias_copy detach_copy unfold_copy "
        "_reshape_copy _reshape_from_tensor _chunk_cat _pack_padded_sequence _nested_tensor_from_mask "
        "_to_dense _pin_memory narrow_copy complex _pack_padded_sequence_backward "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d _upsample_nearest_exact3d"
    ),
    "fsdp.all_gather_copy_in",
    "fsdp.split_with_sizes_copy",
    "fsdp.chunk_cat",
    zero_reason="copy",
)
def rearrange(call: Call) -> Cost:
    """The inputs' elements, in other places: read once, written once."""
    return Cost("copy", 0, total_bytes(reads(call)), total_bytes(writes(call)), zero_reason="copy")


@formula(
    *aten("slice_backward select_backward unfold_backward diagonal_backward value_selecting_reduction_backward"),
    zero_reason="copy",
)
def padded_copy(call: Call) -> Cost:
    """The gradient of a slice: a zero tensor of the full size (written whole) with the gradient copied into it."""
    return Cost("copy", 0, total_bytes(reads(call)), total_bytes(writes(call)), zero_reason="copy")


@formula(
    *aten("slice_scatter select_scatter diagonal_scatter as_strided_scatter"),
    zero_reason="copy",
)
def scatter_slice(call: Call) -> Cost:
    """A copy of ``self`` in which a slice comes from ``src``: the slice of self is not needed."""
    base, source = tensor(call, 0, "self"), tensor(call, 1, "src")
    read = max(0, total_bytes((base,)) - total_bytes((source,))) + total_bytes((source,))
    return Cost("copy", 0, read, total_bytes(call.outputs), zero_reason="copy")


@formula(
    *aten(
        "_local_scalar_dense item is_nonzero sym_size sym_stride sym_numel sym_storage_offset is_same_size size stride "
        "_fused_sdp_choice _has_compatible_shallow_copy_type is_pinned _version _assert_async _assert_scalar "
        "_assert_tensor_metadata record_stream _use_cudnn_ctc_loss _cudnn_init_dropout_state"
    ),
    "prim.device",
    "profiler._record_function_enter_new",
    "profiler._record_function_exit",
    zero_reason="host",
)
def host(call: Call) -> Cost:  # noqa: ARG001
    """A question that the host answers from sizes, or one scalar that it reads."""
    return Cost("view", 0, 0, 0, zero_reason="host")
