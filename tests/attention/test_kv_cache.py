"""Caches of keys and values: what lies in them, what attention over them sees, and on what not a bit depends."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rooftile import KVCache, SlidingWindow, UsageError, masks
from rooftile._attention import library
from rooftile._attention.kv_storage import BLOCK, Paged

B, HQ, HKV, D, DV = 3, 4, 2, 16, 24
NATIVE = ["native"] if not library.MISSING else []
KERNELS = ["tiled", "reference", *NATIVE]
STORAGES = ["contiguous", "paged"]
CAUSAL = masks.causal(align="bottom-right")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make(storage, capacity, *, batch=B, page_size=16, dtype=torch.float32, eviction="refuse", spare_pages=0):
    """A cache whose memory is NaN wherever nothing was written to it."""
    options = {"value_dim": DV, "dtype": dtype, "eviction": eviction}
    if storage == "contiguous":
        cache = KVCache(batch, HKV, capacity, D, **options)
    else:
        cache = KVCache.paged(batch, HKV, batch * -(-capacity // page_size) + spare_pages, page_size, D, **options)
    cache._storage.keys.fill_(torch.nan)
    cache._storage.values.fill_(torch.nan)
    return cache


def tokens(length, *, batch=B, dtype=torch.float32):
    q, k = torch.randn(batch, HQ, length, D), torch.randn(batch, HKV, length, D)
    return q.to(dtype), k.to(dtype), torch.randn(batch, HKV, length, DV).to(dtype)


def expected(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """The definition in fp64 for one sequence: q (Hq, Lq, D), k (Hkv, Lk, D), visible (Lq, Lk)."""
    k, v = (x.double().repeat_interleave(HQ // HKV, 0) for x in (k, v))
    scores = (q.double() @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    p = torch.where(lse.unsqueeze(-1) == -torch.inf, 0, torch.exp(scores - lse.unsqueeze(-1)))
    return p @ v, lse


def last_rows(rows: int, keys: int, window: int | None = None) -> Tensor:
    """Visible pairs of the last ``rows`` of ``keys`` tokens, causal, at most ``window`` keys each."""
    position, j = torch.arange(keys - rows, keys).unsqueeze(1), torch.arange(keys)
    return (j <= position) & (j > position - (window or keys))


# ------------------------------------------------------------------------------------------------------------ attention
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("storage", STORAGES)
def test_ragged_prefill_and_decode_agree_with_the_definition(storage, kernel):
    cache, lengths, steps = make(storage, 700), [3, 600, 37], 3
    q, k, v = tokens(600)
    cache.append(k, v, lengths)
    out, lse = cache.attend(q, lengths=lengths, mask=CAUSAL, return_lse=True, kernel=kernel)
    history = [(k[b, :, :n], v[b, :, :n]) for b, n in enumerate(lengths)]
    for b, n in enumerate(lengths):
        check(out[b, :, :n], lse[b, :, :n], q[b, :, :n], *history[b], last_rows(n, n))
        assert torch.equal(out[b, :, n:], torch.zeros_like(out[b, :, n:]))
        assert bool((lse[b, :, n:] == -torch.inf).all())
    for _ in range(steps):
        q, k, v = tokens(1)
        cache.append(k, v)
        out, lse = cache.attend(q, return_lse=True, kernel=kernel)
        history = [
            (torch.cat([old_k, k[b]], 1), torch.cat([old_v, v[b]], 1)) for b, (old_k, old_v) in enumerate(history)
        ]
        for b, (all_k, all_v) in enumerate(history):
            check(out[b], lse[b], q[b], all_k, all_v, last_rows(1, all_k.shape[1]))
    assert cache.lengths.tolist() == [n + steps for n in lengths]


def check(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> None:
    want_out, want_lse = expected(q, k, v, visible)
    torch.testing.assert_close(out.double(), want_out, rtol=0, atol=3e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=5e-6)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    "mask",
    [CAUSAL, masks.window(5, align="bottom-right"), masks.prefix(4, align="bottom-right") & masks.window(
        left=20, right=3, align="bottom-right"), masks.causal(align="top-left")],
    ids=str,
)  # fmt: skip
def test_each_sequence_reads_a_mask_with_its_own_lengths(storage, kernel, mask):
    cache, before, chunk = make(storage, 64), [9, 30, 17], 7
    _, k0, v0 = tokens(30)
    q, k1, v1 = tokens(chunk)
    cache.append(k0, v0, before)
    cache.append(k1, v1)
    out, lse = cache.attend(q, mask=mask, return_lse=True, kernel=kernel)
    for b, n in enumerate(before):
        k, v = torch.cat([k0[b, :, :n], k1[b]], 1), torch.cat([v0[b, :, :n], v1[b]], 1)
        check(out[b], lse[b], q[b], k, v, mask.materialize(chunk, n + chunk)[0, 0])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("storage", STORAGES)
def test_scale_softcap_and_sinks_reach_the_kernel(storage, kernel):
    cache = make(storage, 600)
    q, k, v = tokens(600)
    cache.append(k, v)
    sinks = torch.randn(HQ)
    out, lse = cache.attend(q[:, :, -1:], scale=0.5, softcap=2.0, sinks=sinks, return_lse=True, kernel=kernel)
    k, v = (x.double().repeat_interleave(HQ // HKV, 1) for x in (k, v))
    scores = 2 * torch.tanh(0.5 * (q[:, :, -1:].double() @ k.mT) / 2)
    both = torch.cat([scores, sinks.double().view(1, HQ, 1, 1).expand(B, HQ, 1, 1)], -1)
    torch.testing.assert_close(lse.double(), torch.logsumexp(both, -1), rtol=0, atol=5e-6)
    torch.testing.assert_close(out.double(), torch.softmax(both, -1)[..., :-1] @ v, rtol=0, atol=3e-6)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_of_attention_can_be_cached(storage, dtype):
    cache = make(storage, 40, dtype=dtype)
    q, k, v = tokens(33, dtype=dtype)
    cache.append(k, v)
    out, lse = cache.attend(q[:, :, -1:], return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    for b in range(B):
        want, _ = expected(q[b, :, -1:], k[b], v[b], last_rows(1, 33))
        tolerance = 4 * torch.finfo(dtype).eps * float(want.abs().max())
        torch.testing.assert_close(out[b].double(), want, rtol=0, atol=tolerance)


def test_the_output_merges_its_heads_as_a_view():
    for storage in STORAGES:
        cache = make(storage, 600)
        q, k, v = tokens(600)
        cache.append(k, v)
        assert cache.attend(q, mask=CAUSAL, kernel="tiled").transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("storage", STORAGES)
def test_an_empty_cache_and_empty_calls_give_empty_results(storage):
    cache = make(storage, 8)
    q, k, v = tokens(0)
    cache.append(k, v)
    assert cache.attend(q, mask=CAUSAL).shape == (B, HQ, 0, DV)
    out, lse = cache.attend(tokens(1)[0], lengths=[0, 0, 0], return_lse=True)
    assert torch.equal(out, torch.zeros(B, HQ, 1, DV))
    assert bool((lse == -torch.inf).all())


# ------------------------------------------------------------------------------------------- what not a bit depends on
def decode(
    cache, sequence: int, q: Tensor, k: Tensor, v: Tensor, others: list[int], kernel: str
) -> tuple[Tensor, Tensor]:
    """Result of ``sequence`` whose keys are k (Hkv, L, D), beside neighbours of ``others`` keys and NaN behind all."""
    batch = cache.batch
    lengths = [*others[:sequence], k.shape[1], *others[sequence:]]
    all_k = torch.randn(batch, HKV, max(lengths), D, dtype=k.dtype)
    all_v = torch.randn(batch, HKV, max(lengths), DV, dtype=k.dtype)
    all_q = torch.randn(batch, HQ, q.shape[1], D, dtype=k.dtype)
    all_k[sequence, :, : k.shape[1]], all_v[sequence, :, : k.shape[1]], all_q[sequence] = k, v, q
    cache.append(all_k, all_v, lengths)
    rows = [min(q.shape[1], n) for n in lengths]
    out, lse = cache.attend(all_q, lengths=rows, mask=CAUSAL, return_lse=True, kernel=kernel)
    return out[sequence], lse[sequence]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "rows"), [(1, 1), (40, 1), (513, 1), (700, 5)])
def test_bits_depend_neither_on_capacity_nor_on_neighbours_nor_on_page_size(kernel, dtype, length, rows):
    q = torch.randn(HQ, rows, D).to(dtype)
    k, v = torch.randn(HKV, length, D).to(dtype), torch.randn(HKV, length, DV).to(dtype)
    runs = [
        decode(make("contiguous", capacity, dtype=dtype), 1, q, k, v, others, kernel)
        for capacity, others in ((length, [1, 1]), (length + 1, [1, length]), (1100, [0, 3]), (1100, [1100, 1025]))
    ] + [
        decode(make("paged", 1100, page_size=size, dtype=dtype), 1, q, k, v, others, kernel)
        for size, others in ((16, [5, 0]), (1, [1, 64]), (7, [1100, 600]), (256, [1, 1]), (1100, [1100, 1]))
    ]
    paged_like_contiguous = runs
    for out, lse in paged_like_contiguous:
        assert torch.equal(out, runs[0][0])
        assert torch.equal(lse, runs[0][1])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("storage", STORAGES)
def test_memory_beyond_the_lengths_changes_no_bit(storage, kernel):
    results = []
    for filling in (0.0, torch.nan, torch.inf, 1e4):
        torch.manual_seed(1)
        cache = make(storage, 900)
        cache._storage.keys.fill_(filling)
        cache._storage.values.fill_(filling)
        q, k, v = tokens(530)
        cache.append(k, v, [530, 17, 512])
        results.append(cache.attend(q[:, :, -1:], return_lse=True, kernel=kernel))
    for out, lse in results:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
        assert bool(out.isfinite().all())


@pytest.mark.parametrize("storage", STORAGES)
def test_a_prompt_in_chunks_leaves_the_same_bits_as_one_append(storage):
    _, k, v = tokens(100)
    q = tokens(1)[0]
    whole, chunked = make(storage, 120), make(storage, 120)
    whole.append(k, v)
    for a, b in ((0, 1), (1, 50), (50, 83), (83, 100)):
        chunked.append(k[:, :, a:b], v[:, :, a:b])
    assert torch.equal(whole.attend(q), chunked.attend(q))


@pytest.mark.parametrize("storage", STORAGES)
def test_any_strides_are_taken(storage):
    cache, plain = make(storage, 40), make(storage, 40)
    q, k, v = tokens(20)
    strided = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    plain.append(k, v)
    cache.append(*strided[1:])
    assert torch.equal(cache.attend(strided[0], mask=CAUSAL), plain.attend(q, mask=CAUSAL))


# ------------------------------------------------------------------------------------------------------------- eviction
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("chunk", [1, 5])
def test_a_sliding_window_gives_the_bits_of_a_window_mask_over_everything(storage, kernel, chunk):
    window, total = 40, BLOCK + 800
    small = make(storage, window + 50, batch=2, eviction=SlidingWindow(window), spare_pages=2)
    large = make(storage, total + 60, batch=2)
    mask = masks.window(window, align="bottom-right")
    while int(large.positions[0]) < total:
        for length in (45, chunk):
            q, k, v = tokens(length, batch=2)
            small.append(k, v)
            large.append(k, v)
        if small.positions[0] % 4 == 0 or small.positions[0] > total:
            got = small.attend(q, mask=None if chunk == 1 else CAUSAL, return_lse=True, kernel=kernel)
            want = large.attend(q, mask=mask, return_lse=True, kernel=kernel)
            assert all(map(torch.equal, got, want))
    assert small.lengths.tolist() == [window, window]
    assert small.positions.tolist() == large.positions.tolist()
    assert int(small._storage.origin(0)) > 0 if storage == "contiguous" else small.free_pages > 0


def test_a_window_forgets_only_what_lies_behind_it_of_each_sequence():
    cache = make("contiguous", 30, batch=2, eviction=SlidingWindow(20))
    _, k, v = tokens(11, batch=2)
    for _ in range(80):
        cache.append(k, v, [11, 0])  # the second sequence has no tokens
    assert cache.lengths.tolist() == [20, 0]
    assert cache.positions.tolist() == [880, 0]


def test_pages_behind_the_window_go_back_to_the_pool():
    cache = KVCache.paged(2, HKV, 8, 4, D, value_dim=DV, dtype=torch.float32, eviction=SlidingWindow(6))
    _, k, v = tokens(1, batch=2)
    for _ in range(100):
        cache.append(k, v)
    assert cache.free_pages >= 8 - 2 * 3  # 6 keys lie in at most 3 pages of 4


@pytest.mark.parametrize("storage", STORAGES)
def test_a_full_cache_refuses_and_stays_as_it_was(storage):
    cache = make(storage, 16, batch=2)
    q, k, v = tokens(16, batch=2)
    cache.append(k, v, [16, 3])
    before = cache.attend(q[:, :, :1])
    with pytest.raises(UsageError, match=r"SlidingWindow"):
        cache.append(k[:, :, :14], v[:, :, :14])
    assert cache.lengths.tolist() == [16, 3]
    assert torch.equal(cache.attend(q[:, :, :1]), before)


def test_a_window_too_small_for_the_chunk_refuses():
    cache = make("contiguous", 20, batch=2, eviction=SlidingWindow(16))
    _, k, v = tokens(20, batch=2)
    cache.append(k, v)
    cache.append(k[:, :, :5], v[:, :, :5])
    with pytest.raises(UsageError, match="keeps 15 keys, and 6 more exceed the capacity of 20: append fewer tokens"):
        cache.append(k[:, :, :6], v[:, :, :6])


def test_queries_older_than_what_the_window_kept_are_refused():
    cache = KVCache.paged(1, HKV, 16, 4, D, value_dim=DV, dtype=torch.float32, eviction=SlidingWindow(6))
    q, k, v = tokens(1, batch=1)
    for _ in range(40):
        cache.append(k, v)
    with pytest.raises(UsageError, match="are forgotten"):
        cache.attend(q.expand(1, HQ, 20, D), mask=CAUSAL)


def test_clearing_a_sequence_gives_its_room_to_the_next():
    for storage in STORAGES:
        cache = make(storage, 16, batch=2)
        q, k, v = tokens(16, batch=2)
        cache.append(k, v)
        cache.clear([1])
        assert cache.lengths.tolist() == [16, 0]
        cache.append(k[:, :, :5], v[:, :, :5], [0, 5])
        out = cache.attend(q[:, :, :5], lengths=[0, 5], mask=CAUSAL)
        want, _ = expected(q[1, :, :5], k[1, :, :5], v[1, :, :5], last_rows(5, 5))
        torch.testing.assert_close(out[1].double(), want, rtol=0, atol=3e-6)
        cache.clear()
        assert cache.lengths.tolist() == [0, 0]


def test_random_appends_and_clears_never_share_a_page():
    cache = make("paged", 40, page_size=4, spare_pages=2)
    generator = torch.Generator().manual_seed(5)
    held = [[] for _ in range(B)]
    for _ in range(60):
        counts = torch.randint(0, 7, (B,), generator=generator).tolist()
        _, k, v = tokens(6)
        for b in range(B):
            if len(held[b]) + counts[b] > 40:
                cache.clear([b])
                held[b] = []
        cache.append(k, v, counts)
        for b, n in enumerate(counts):
            held[b] += [k[b, :, t] for t in range(n)]
    storage = cache._storage
    assert isinstance(storage, Paged)
    for b in range(B):
        for t, key in enumerate(held[b]):
            page, slot = int(storage.table[b, t // 4]), t % 4
            assert torch.equal(storage.keys[page, :, slot], key)
    used = sum(-(-len(keys) // 4) for keys in held)
    assert cache.free_pages == storage.keys.shape[0] - used


def test_a_cache_made_in_inference_mode_is_used_in_and_out_of_it():
    with torch.inference_mode():
        cache = make("contiguous", 8)
        q, k, v = tokens(1)
        cache.append(k, v)
        inside = cache.attend(q)
    cache.append(k, v)
    torch.testing.assert_close(cache.attend(q.clone()), inside, rtol=0, atol=1e-6)  # the same key twice


# ---------------------------------------------------------------------------------------------------------------- bytes
def test_bytes_are_those_of_the_memory_and_used_bytes_those_of_the_keys():
    cache = KVCache(2, 8, 4096, 128, dtype=torch.bfloat16)
    assert cache.bytes == 2 * 2 * 8 * 4096 * 128 * 2
    assert cache.used_bytes == 0
    cache.append(torch.zeros(2, 8, 10, 128).bfloat16(), torch.zeros(2, 8, 10, 128).bfloat16(), [10, 3])
    assert cache.used_bytes == 2 * 8 * 13 * 128 * 2
    paged = KVCache.paged(2, 8, 32, 16, 128, value_dim=64, dtype=torch.float32)
    assert paged.bytes == 32 * 16 * 8 * (128 + 64) * 4


def test_a_window_caches_no_more_than_its_block_beyond_the_capacity():
    cache = KVCache(1, 1, 100, D, dtype=torch.float32, eviction=SlidingWindow(100))
    assert cache.bytes == 2 * (100 + BLOCK - 1) * D * 4


# ------------------------------------------------------------------------------------------------------------- refusals
def filled(**options) -> KVCache:
    cache = make("contiguous", 32, **options)
    _, k, v = tokens(8)
    cache.append(k, v)
    return cache


def append(k: Tensor, v: Tensor, lengths=None) -> None:
    make("contiguous", 32).append(k, v, lengths)


Q1, K1, V1 = torch.zeros(B, HQ, 1, D), torch.zeros(B, HKV, 2, D), torch.zeros(B, HKV, 2, DV)


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (lambda: KVCache(0, 1, 1, 1, dtype=torch.float32), "batch=0"),
        (lambda: KVCache(1, 1, 0, 1, dtype=torch.float32), "capacity=0"),
        (lambda: KVCache(1, 1, 1, 2.0, dtype=torch.float32), "head_dim=2.0"),
        (lambda: KVCache(1, 1, 1, 1, dtype=torch.int8), "dtype=torch.int8"),
        (lambda: KVCache(1, 1, 8, 1, dtype=torch.float32, eviction="oldest"), "eviction='oldest'"),
        (lambda: KVCache(1, 1, 8, 1, dtype=torch.float32, eviction=SlidingWindow(9)), "9 keys"),
        (lambda: KVCache.paged(1, 1, 8, 0, 1, dtype=torch.float32), "page_size=0"),
        (lambda: SlidingWindow(0), "keys=0"),
        (lambda: append(K1.half(), V1), "k is torch.float16"),
        (lambda: append(K1, V1.to("meta")), "v is torch.float32 on meta"),
        (lambda: append(K1[:, :1], V1), "2 heads of 16"),
        (lambda: append(K1[0], V1), "k has shape"),
        (lambda: append(K1[:2], V1), "3 sequences"),
        (lambda: append(K1, V1[:, :, :1]), "v 1"),
        (lambda: append(K1, V1, [3, 0, 0]), r"\[3, 0, 0\]"),
        (lambda: append(K1, V1, [1, 1]), r"\[1, 1\]"),
        (lambda: append(K1, V1, [True, 1, 1]), "True"),
        (lambda: append(K1, V1.tolist()), "v is list"),
        (lambda: append(K1, V1, torch.tensor([1.0, 1.0, 1.0])), "float32"),
        (lambda: append(K1.clone().requires_grad_(), V1), "k requires a gradient"),
        (lambda: filled().attend(Q1.clone().requires_grad_()), "q requires a gradient"),
        (lambda: filled().attend(Q1.half()), "q is torch.float16"),
        (lambda: filled().attend(Q1[:, :3]), "multiple of 2"),
        (lambda: filled().attend(Q1.expand(B, HQ, 4, D)), "bottom-right"),
        (lambda: filled().attend(Q1.expand(B, HQ, 4, D), mask=masks.causal()), "sequence 0"),
        (lambda: filled().attend(Q1.expand(B, HQ, 9, D), mask=CAUSAL), "9 queries and holds 8 keys"),
        (lambda: filled().attend(Q1, mask=masks.padding([8, 8, 8])), "padding"),
        (lambda: filled().attend(Q1, mask=masks.dense(torch.ones(1, 8, dtype=torch.bool))), "dense"),
        (lambda: filled().attend(Q1, sinks=torch.zeros(3)), "sinks"),
        (lambda: filled().attend(Q1, softcap=-1.0), "softcap=-1.0"),
        (lambda: filled().attend(Q1, kernel="fast"), "fast"),
        (lambda: filled().clear([3]), "no sequence 3"),
        (lambda: filled().clear(1), r"clear\(1\)"),
        (lambda: filled().free_pages, "no pages"),
        (lambda: filled(eviction=SlidingWindow(8)).attend(Q1, mask=masks.prefix(2, align="bottom-right")), "prefix"),
    ],
)  # fmt: skip
def test_what_can_not_be_honoured_is_refused_with_the_value(run, sentence):
    with pytest.raises(UsageError, match=sentence):
        run()


def test_queries_without_lengths_after_a_ragged_append_are_refused():
    cache = make("contiguous", 32)
    q, k, v = tokens(4)
    cache.append(k, v, [4, 1, 2])
    with pytest.raises(UsageError, match=r"\[4, 1, 2\]"):
        cache.attend(q, mask=CAUSAL)


def test_the_representation_says_what_is_used():
    assert "lengths [8, 8, 8], 7,680 of 30,720 bytes used" in repr(filled())


@pytest.mark.parametrize("kernel", ["auto", "tiled"])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_cache_of_fake_tensors_gives_shapes_as_an_audit_asks_for_them(storage, kernel):
    with FakeTensorMode():
        cache = make(storage, 40)
        q, k, v = tokens(20)
        cache.append(k, v, [20, 3, 7])
        out, lse = cache.attend(q, lengths=[20, 3, 7], mask=CAUSAL, return_lse=True, kernel=kernel)
        assert (out.shape, lse.shape) == ((B, HQ, 20, DV), (B, HQ, 20))
        assert cache.attend(q[:, :, :1], kernel=kernel).shape == (B, HQ, 1, DV)


@pytest.mark.parametrize("storage", STORAGES)
def test_autocast_brings_fp32_tensors_to_the_caches_dtype(storage):
    inside, outside = (make(storage, 40, dtype=torch.bfloat16) for _ in range(2))
    q, k, v = tokens(20)
    with torch.autocast("cpu", torch.bfloat16):
        inside.append(k, v)
        out = inside.attend(q, mask=CAUSAL)
    outside.append(k.bfloat16(), v.bfloat16())
    assert torch.equal(out, outside.attend(q.bfloat16(), mask=CAUSAL))
    with torch.autocast("cpu", torch.float16), pytest.raises(UsageError, match=r"k is torch\.float32"):
        inside.append(k, v)


# ------------------------------------------------------------------------------------------------------------- operator
@pytest.mark.skipif(bool(library.MISSING), reason="pages go through an operator only where there is a compiled kernel")
def test_the_paged_operator_passes_opcheck_and_has_no_gradient():
    cache = make("paged", 40)
    q, k, v = tokens(33)
    cache.append(k, v, [33, 2, 17])
    storage = cache._storage
    ends = torch.tensor([[33], [2], [17]], dtype=torch.int32)
    operands = (
        storage.keys,
        storage.values,
        storage.table,
        torch.zeros_like(ends),
        ends,
        torch.zeros(HQ),
        0.25,
        0.0,
        33,
    )
    torch.library.opcheck(torch.ops.rooftile.paged_attention.default, (q[:, :, :1], *operands))
    out, _ = torch.ops.rooftile.paged_attention(q[:, :, :1].clone().requires_grad_(), *operands)
    with pytest.raises(UsageError, match="no gradient"):
        out.sum().backward()


def test_a_compiled_step_runs_the_cache_itself_and_gives_the_same_bits():
    cache, plain = make("contiguous", 32), make("contiguous", 32)
    q, k, v = tokens(1)

    def step(cache: KVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.append(k + 1, v + 1)
        return cache.attend(q * 2) + 1

    compiled = torch.compile(step, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            assert torch.equal(compiled(cache, q, k, v), step(plain, q, k, v))
