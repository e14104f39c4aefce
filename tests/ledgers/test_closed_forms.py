"""Closed forms against the tables of the papers that they come from."""

import pytest

from rooftile import devices, zoo
from rooftile.errors import UsageError
from rooftile.ledgers.closed_forms import activations_estimate, kv_cache_size, states
from rooftile.ledgers.communication import collective

GIB = 2**30


def test_gpt2_1_5b_states_are_24_gb():
    ledger = states(1.5e9, precision="bf16-master")
    assert (ledger.parameters, ledger.gradients) == (3e9, 3e9)
    assert ledger.master_weights + ledger.optimizer == 18e9
    assert ledger.total == 24e9
    assert ledger.evidence == "derived"
    assert "2 + 2 + 4 + 8 bytes per parameter" in ledger.convention


def test_the_real_gpt2_xl_has_24_92_gb_of_states():
    assert round(states(1_557_611_200, precision="fp16-master").total / 1e9, 2) == 24.92


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_table_1(stage, gigabytes):
    ledger = states(7.5e9, precision="fp16-master", zero_stage=stage, ranks=64)
    assert float(f"{ledger.total / 1e9:.3g}") == gigabytes


@pytest.mark.parametrize(
    ("precision", "optimizer", "per_parameter"),
    [
        ("fp32", "adamw", 16), ("bf16-mixed", "adamw", 16), ("fp16-mixed", "adamw", 16), ("bf16", "adamw", 8),
        ("bf16-master", "adamw", 16), ("fp32", "sgd", 8), ("bf16-master", "sgd", 8), ("bf16-master", "none", 4),
    ],
)  # fmt: skip
def test_bytes_per_parameter_by_precision(precision, optimizer, per_parameter):
    assert states(1000, precision=precision, optimizer=optimizer).total == 1000 * per_parameter


def test_zero_shards_nothing_over_one_rank():
    assert states(1000, zero_stage=3, ranks=1).total == states(1000).total


@pytest.mark.parametrize(("batch", "gigabytes"), [(8, 15.1), (64, 120.8)])
def test_the_12_bsdl_rule(batch, gigabytes):
    estimate = activations_estimate(batch=batch, seq=1024, layers=48, d_model=1600)
    assert round(estimate.total / 1e9, 1) == gigabytes
    assert (estimate.evidence, estimate.rule) == ("derived", "12BSdL")


def test_gpt2_1_5b_states_and_activations_are_39_1_gb():
    activations = activations_estimate(batch=8, seq=1024, layers=48, d_model=1600)
    assert round((states(1.5e9).total + activations.total) / 1e9, 1) == 39.1


MODEL_22B = {"heads": 64, "d_model": 6144, "batch": 4}
MODEL_175B = {"heads": 96, "d_model": 12288, "batch": 1}


@pytest.mark.parametrize(
    ("model", "options", "gibibytes"),
    [
        (MODEL_22B, {}, 6.594),
        (MODEL_22B, {"tensor_parallel": 8, "sequence_parallel": True}, 0.824),
        (MODEL_22B, {"tensor_parallel": 8, "sequence_parallel": True, "recompute": "selective"}, 0.199),
        (MODEL_22B, {"tensor_parallel": 8, "sequence_parallel": True, "recompute": "full"}, 0.094),
        (MODEL_175B, {}, 2.672),
        (MODEL_175B, {"tensor_parallel": 8, "sequence_parallel": True}, 0.334),
        (MODEL_175B, {"tensor_parallel": 8, "sequence_parallel": True, "recompute": "selective"}, 0.0996),
        (MODEL_175B, {"tensor_parallel": 8, "sequence_parallel": True, "recompute": "full"}, 0.0469),
    ],
)
def test_korthikanti_per_layer(model, options, gibibytes):
    estimate = activations_estimate(rule="korthikanti", seq=2048, layers=1, **model, **options)
    digits = len(str(gibibytes).split(".")[1])
    assert round(estimate.per_layer / GIB, digits) == gibibytes


def test_korthikanti_tensor_parallel_alone_leaves_the_norms_whole():
    # By hand: s 4, b 1, h 8, a 2, t 2: sbh = 32, 5as/h = 5, so 32 (10 + 24/2 + 5/2).
    shape = {"rule": "korthikanti", "seq": 4, "batch": 1, "d_model": 8, "heads": 2, "layers": 3, "tensor_parallel": 2}
    assert activations_estimate(**shape).per_layer == 32 * (10 + 12 + 2.5)
    assert activations_estimate(**shape).total == 3 * 32 * 24.5
    assert activations_estimate(**shape, recompute="selective").per_layer == 32 * 22


@pytest.mark.parametrize(
    ("shape", "per_token"),
    [((32, 8, 128), 131_072), ((80, 8, 128), 327_680), ((32, 32, 128), 524_288), ((40, 40, 128), 819_200)],
)
def test_kv_cache_bytes_per_token(shape, per_token):
    size = kv_cache_size(*shape, tokens=4096, batch=3, itemsize=2)
    assert size.bytes_per_token == per_token
    assert size.total == per_token * 4096 * 3


def test_kv_cache_of_the_zoo_uses_kv_heads():
    sizes = zoo.config("llama-3.1-8b")
    size = kv_cache_size(sizes.n_layers, sizes.n_kv_heads, sizes.head_dim, tokens=1, batch=1, itemsize=2)
    assert size.total == 131_072


@pytest.mark.parametrize(
    ("operation", "share"), [("all_reduce", 1.75), ("reduce_scatter", 0.875), ("all_gather", 0.875)]
)
def test_ring_collectives_over_8_ranks(operation, share):
    cost = collective(operation, 1e9, 8, devices.link("nvlink4"))
    assert cost.bytes_per_rank == share * 1e9
    assert cost.seconds == share * 1e9 / 450e9
    assert collective(operation, 1e9, 1).bytes_per_rank == 0
    assert collective(operation, 1e9, 8).seconds is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: states(1, precision="int4"), "precision is 'int4'; choose one of fp32"),
        (lambda: states(1, optimizer="lion"), "optimizer is 'lion'"),
        (lambda: states(1, zero_stage=4), "zero_stage is 4; choose 0, 1, 2 or 3"),
        (lambda: states(0), "params is 0; it has to be positive"),
        (lambda: states(1, ranks=0), "ranks is 0; it has to be positive"),
        (
            lambda: activations_estimate(batch=1, seq=1, layers=1, d_model=1, tensor_parallel=2),
            "12BSdL knows no parallelism",
        ),
        (
            lambda: activations_estimate(batch=1, seq=1, layers=1, d_model=1, rule="korthikanti"),
            "korthikanti needs heads",
        ),
        (lambda: activations_estimate(batch=1, seq=1, layers=1, d_model=1, rule="x"), "rule is 'x'"),
        (lambda: activations_estimate(batch=1, seq=1, layers=1, d_model=1, recompute="x"), "recompute is 'x'"),
        (lambda: kv_cache_size(1, 1, 1, -1, 1, 2), "tokens is -1"),
        (lambda: collective("gossip", 1, 2), "operation is 'gossip'"),
        (lambda: collective("all_reduce", 1, 0), "ranks is 0"),
    ],
)
def test_bad_input_is_one_sentence(call, message):
    with pytest.raises(UsageError, match=message):
        call()
