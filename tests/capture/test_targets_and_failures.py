"""What a target may be, and the one sentence that each mistake gets."""

from __future__ import annotations

import re
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rooftile import devices
from rooftile.capture import CaptureOptions, Step, Trace, capture, load_target
from rooftile.capture.trace_file import load_trace, save_trace
from rooftile.devices import Device
from rooftile.errors import CaptureError, UsageError


def write(folder: Path, text: str, name: str = "steps.py") -> Path:
    path = folder / name
    path.write_text("import torch, rooftile\nfrom torch import nn\n" + textwrap.dedent(text))
    return path


STEP = """
    def step(batch=2, seq=8):
        return rooftile.Step(nn.Linear(seq, 4), (torch.randn(batch, seq),), lambda y: y.sum())
"""


def test_a_function_in_a_file_gets_batch_and_seq_and_builds_on_meta(tmp_path: Path):
    step = load_target(f"{write(tmp_path, STEP)}:step", batch=3, seq=16)
    assert next(step.model.parameters()).is_meta
    assert step.inputs[0].shape == (3, 16)
    assert (step.batch, step.seq) == (3, 16)


def test_a_function_in_a_module_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, h100: Device):
    write(tmp_path, STEP, "rooftile_target_module.py")
    monkeypatch.chdir(tmp_path)
    trace = capture(load_target("rooftile_target_module:step"), h100, CaptureOptions())
    assert trace.settings["target"] == "rooftile_target_module:step"


def test_a_file_may_import_its_neighbours(tmp_path: Path):
    write(tmp_path, "WIDTH = 5", "neighbour_of_target.py")
    path = write(
        tmp_path, "import neighbour_of_target as n\ndef step():\n    return rooftile.Step(nn.Linear(n.WIDTH, 1), ())\n"
    )
    assert load_target(f"{path}:step").model.in_features == 5


def test_a_builder_that_needs_real_values_is_called_without_meta(tmp_path: Path, h100: Device):
    path = write(
        tmp_path,
        """
        def step():
            width = int(torch.tensor([4]).item())
            return rooftile.Step(nn.Linear(width, width), (torch.randn(2, width),), lambda y: y.sum())
        """,
    )
    assert capture(load_target(f"{path}:step"), h100, CaptureOptions()).ops


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("llama-3.1-8", "unknown target .*near matches: llama-3.1-8b.*file.py:function"),
        ("nothing", "unknown target 'nothing'; known: gpt2"),
        ("missing.py:step", "there is no file 'missing.py'.*check the path"),
        ("no_such_package.sub:step", "no module 'no_such_package.sub'"),
        ("{file}:stop", "unknown function .stop.; near matches: step"),
        ("{file}:number", "is of type int, not a function"),
        ("{file}:model", "returned an object of type Linear, not a rooftile.Step; return"),
        ("{file}:needs", "needs the argument 'width'"),
    ],
)
def test_a_bad_target_is_one_sentence_with_the_way_out(target: str, message: str, tmp_path: Path):
    path = write(
        tmp_path,
        STEP + "\n    number = 3\n    def model(): return nn.Linear(2, 2)\n    def needs(width): return None\n",
    )
    with pytest.raises(UsageError, match=message) as caught:
        load_target(target.format(file=path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"batch": 0}, "batch is 0"), ({"seq": -1}, "seq is -1"), ({"phase": "trian"}, "phase 'trian' is not one of")],
)
def test_bad_sizes_and_phases_are_refused_before_anything_is_built(arguments: dict, message: str):
    with pytest.raises(UsageError, match=message):
        load_target("gpt2", **arguments)


def test_seq_beyond_the_models_positions_is_refused():
    with pytest.raises(UsageError, match=r"seq is 2000.*1024"):
        load_target("gpt2", seq=2000)


def test_a_size_that_the_function_has_no_parameter_for_is_refused(tmp_path: Path):
    path = write(tmp_path, "def step(): return rooftile.Step(nn.Linear(2, 2), ())\n")
    with pytest.raises(UsageError, match=r"--batch 4 was given, but .* has no parameter 'batch'"):
        load_target(f"{path}:step", batch=4)


def test_a_branch_on_a_tensors_value_names_the_users_line(tmp_path: Path, h100: Device):
    path = write(
        tmp_path,
        """
        class Branches(nn.Module):
            def forward(self, x):
                if x.sum() > 0:
                    return x
                return -x

        def step():
            return rooftile.Step(Branches(), (torch.randn(3),), phase="prefill")
        """,
    )
    with pytest.raises(CaptureError) as caught:
        capture(load_target(f"{path}:step"), h100, CaptureOptions())
    assert re.search(r"steps\.py:6 \(`if x\.sum\(\) > 0:`\) needs the value of a tensor.*--live", str(caught.value))
    assert caught.value.exit_code == 3


def test_a_branch_on_a_tensors_value_runs_live(h100: Device):
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    trace = capture(Step(Branches(), (torch.ones(3),), phase="prefill"), h100, CaptureOptions(live=True))
    assert "aten.sum.default" in {op.operator for op in trace.ops}


def test_an_error_of_the_model_itself_names_the_users_line(tmp_path: Path, h100: Device):
    path = write(
        tmp_path,
        """
        def step():
            model = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 6))
            return rooftile.Step(model, (torch.randn(2, 3),), lambda y: y.sum())
        """,
    )
    with pytest.raises(CaptureError, match=r"RuntimeError"):
        capture(load_target(f"{path}:step"), h100, CaptureOptions())


def test_a_builder_that_raises_names_the_users_line(tmp_path: Path):
    path = write(tmp_path, "def step():\n    raise KeyError('weights')\n")
    with pytest.raises(CaptureError, match=r"steps\.py:4 .*KeyError: 'weights'"):
        load_target(f"{path}:step")


def test_a_file_that_does_not_parse_names_the_line(tmp_path: Path):
    path = write(tmp_path, "def step(:\n")
    with pytest.raises(CaptureError, match=r"steps\.py:3 with SyntaxError"):
        load_target(f"{path}:step")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Step("gpt2", ()), "Step.model is a str; give a torch.nn.Module"),
        (lambda: Step(nn.Linear(1, 1), [1]), "Step.inputs is a list"),
        (lambda: Step(nn.Linear(1, 1), (), phase="training"), "Step.phase is 'training'"),
        (lambda: Step(nn.Linear(1, 1), (), loss=3), "Step.loss is a int"),
        (lambda: Step(nn.Linear(1, 1), (), optimizer=3), "Step.optimizer is a int"),
        (lambda: Step(nn.Linear(1, 1), (), optimizer=torch.optim.SGD, phase="decode"), "leave it None for inference"),
        (lambda: CaptureOptions(precision="bf16-mix"), "unknown precision 'bf16-mix'; near matches: bf16-mixed"),
        (lambda: CaptureOptions(micro_batches=0), "micro_batches is 0"),
    ],
)
def test_a_contradictory_step_is_refused_when_it_is_made(make, message: str):
    with pytest.raises(UsageError, match=message):
        make()


def test_a_training_step_without_a_scalar_loss_is_refused(h100: Device):
    with pytest.raises(UsageError, match=r"scalar loss, and got a tensor of shape \(2, 4\)"):
        capture(Step(nn.Linear(3, 4), (torch.randn(2, 3),)), h100, CaptureOptions())


def test_a_loss_without_a_gradient_is_refused(h100: Device):
    frozen = nn.Linear(3, 4).requires_grad_(False)
    with pytest.raises(UsageError, match="does not depend on any parameter"):
        capture(Step(frozen, (torch.randn(2, 3),), lambda y: y.sum()), h100, CaptureOptions())


def test_an_optimizer_that_needs_a_closure_is_refused(h100: Device):
    step = Step(nn.Linear(3, 4), (torch.randn(2, 3),), lambda y: y.sum(), torch.optim.LBFGS)
    with pytest.raises(UsageError, match="needs no closure"):
        capture(step, h100, CaptureOptions())


def test_checkpointing_a_model_without_repeated_layers_is_refused(h100: Device):
    step = Step(nn.Linear(3, 4), (torch.randn(2, 3),), lambda y: y.sum())
    with pytest.raises(UsageError, match="finds no list of repeated layers"):
        capture(step, h100, CaptureOptions(checkpoint="blocks"))


def test_the_steps_own_optimizer_is_the_one_that_runs(h100: Device):
    model = nn.Linear(8, 8, bias=False)
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trace = capture(Step(model, (torch.randn(2, 8),), lambda y: y.sum(), own), h100, CaptureOptions(precision="fp32"))
    assert trace.settings["optimizer"] == "SGD"
    assert [s.name for s in trace.storages if s.role == "optimizer_state"] == ["weight.momentum_buffer"]
    assert not own.state  # the user's optimizer was not touched


def test_a_mixed_precision_leaves_a_16_bit_model_as_it_is_and_says_so(h100: Device):
    step = Step(nn.Linear(8, 8).bfloat16(), (torch.randn(2, 8, dtype=torch.bfloat16),), lambda y: y.sum())
    trace = capture(step, h100, CaptureOptions(precision="bf16-mixed"))
    assert trace.settings["precision"] == "as-is"
    assert any("needs FP32 parameters" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("dtype", "phase", "expected"),
    [
        (torch.float32, "train", "bf16-mixed"),
        (torch.float32, "prefill", "bf16"),
        (torch.float16, "train", "as-is"),
        (torch.float16, "decode", "as-is"),
    ],
)
def test_without_a_word_the_precision_is_the_convention_and_assumed(dtype, phase: str, expected: str, h100: Device):
    loss = (lambda y: y.sum()) if phase == "train" else None
    step = Step(nn.Linear(8, 8, dtype=dtype), (torch.randn(2, 8, dtype=dtype),), loss, phase=phase)
    settings = capture(step, h100, CaptureOptions()).settings
    assert (settings["precision"], settings["precision_evidence"]) == (expected, "assumed")
    declared = capture(step, h100, CaptureOptions(precision="as-is")).settings
    assert declared["precision_evidence"] == "declared"


def test_bert_with_an_attention_mask_is_captured_on_fake_tensors(h100: Device):
    import transformers

    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    model = transformers.BertForMaskedLM(config)
    ids = torch.randint(100, (2, 12))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    trace = capture(Step(model, inputs), h100, CaptureOptions())
    assert {op.phase for op in trace.ops} == {"forward", "backward", "optimizer"}
    attention = [op for op in trace.ops if op.operator == "rooftile.tiled_attention.default"]
    assert len(attention) == 2


def test_a_trace_is_the_same_after_a_file(tmp_path: Path, h100: Device):
    trace = capture(load_target("gpt2", seq=64), h100, CaptureOptions(attention="materialized"))
    save_trace(trace, tmp_path / "step.trace")
    again = load_trace(tmp_path / "step.trace")
    assert again.ops == trace.ops
    assert again.storages == trace.storages
    assert again.notes == trace.notes
    assert [p.name for p in tmp_path.iterdir()] == ["step.trace"]


def test_a_trace_opens_without_torch(tmp_path: Path, h100: Device):
    import subprocess
    import sys

    save_trace(capture(load_target("gpt2", seq=16), h100, CaptureOptions()), tmp_path / "t")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from rooftile.capture.trace_file import load_trace\n"
        f"print(len(load_trace({str(tmp_path / 't')!r}).ops))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


@pytest.mark.parametrize("content", [b"", b"not gzip", b"\x1f\x8b broken"])
def test_a_file_that_is_no_trace_is_one_sentence(content: bytes, tmp_path: Path):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(UsageError, match="is not a rooftile trace"):
        load_trace(tmp_path / "t")


def test_a_trace_of_a_later_schema_says_so(tmp_path: Path):
    import gzip
    import json

    (tmp_path / "t").write_bytes(gzip.compress(json.dumps({"schema": "rooftile.trace/2"}).encode()))
    with pytest.raises(UsageError, match=r"rooftile\.trace/2"):
        load_trace(tmp_path / "t")


@pytest.mark.parametrize("name", ["h100-sxm", "mi300x", "tpu-v5p", "v100-sxm2-32gb"])
def test_every_device_class_runs_every_phase(name: str):
    device = devices.load(name)
    for phase in ("train", "prefill", "decode"):
        step = load_target("gpt2", seq=32, phase=phase)
        trace = capture(step, device, CaptureOptions(precision="fp32"))
        assert trace.settings["mode"] == "meta"
        assert {op.phase for op in trace.ops} == (
            {"forward", "backward", "optimizer"} if phase == "train" else {"forward"}
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_a_compiled_model_is_audited_as_the_model_that_it_wraps(h100: Device):
    model = nn.Linear(8, 8)
    plain, compiled = (
        capture(Step(m, (torch.randn(2, 8),), lambda y: y.sum()), h100, CaptureOptions())
        for m in (model, torch.compile(model))
    )
    assert compiled.ops == plain.ops


def test_a_live_target_is_built_on_real_tensors(tmp_path: Path, h100: Device):
    path = write(
        tmp_path,
        """
        class Reads(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("table", torch.arange(10.0))

            def forward(self, ids):
                assert ids.tolist() == list(range(10)), ids
                assert self.table[3].item() == 3
                return self.table[ids]

        def step():
            return rooftile.Step(Reads(), (torch.arange(10),), phase="prefill")
        """,
    )
    step = load_target(f"{path}:step", live=True)
    assert capture(step, h100, CaptureOptions(live=True, precision="fp32")).settings["mode"] == "live"
    tokens = load_target("gpt2", seq=16, live=True).inputs["tokens"]
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 50257


def test_a_live_capture_of_meta_tensors_is_refused(h100: Device):
    with pytest.raises(UsageError, match="needs real tensors"):
        capture(load_target("gpt2", seq=16), h100, CaptureOptions(live=True))


def test_a_target_that_exits_is_one_sentence(tmp_path: Path):
    inside = write(tmp_path, "import sys\ndef step():\n    sys.exit(7)\n", "inside.py")
    with pytest.raises(CaptureError, match=r"inside\.py:5 .*called sys\.exit\(7\)"):
        load_target(f"{inside}:step")
    outside = write(tmp_path, "import sys\nsys.exit(7)\n", "outside.py")
    with pytest.raises(CaptureError, match=r"outside\.py failed at .*outside\.py:4 with SystemExit"):
        load_target(f"{outside}:step")


def test_a_file_or_folder_without_the_rest_says_what_is_missing(tmp_path: Path):
    path = write(tmp_path, STEP)
    for target in (f"{path}", f"{path}:"):
        with pytest.raises(UsageError, match=r"names a file and no function; give .*steps\.py:FUNCTION"):
            load_target(target)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"is a folder; give .*config\.json"):
        load_target(str(tmp_path))


def test_an_error_inside_torchs_own_modules_names_the_module(h100: Device):
    step = Step(nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 6)), (torch.randn(2, 3),), lambda y: y.sum())
    with pytest.raises(CaptureError, match=r"module '1'.*RuntimeError"):
        capture(step, h100, CaptureOptions())


def test_contexts_that_the_caller_is_in_do_not_leak_into_the_step(h100: Device):
    def run() -> tuple:
        step = Step(nn.Linear(8, 8), (torch.randn(2, 8),), lambda y: y.sum())
        return capture(step, h100, CaptureOptions(precision="fp32")).ops, torch.is_autocast_enabled("cpu")

    plain, _ = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run() == (plain, True)
    with torch.no_grad():
        assert run()[0] == plain
    with torch.inference_mode():
        assert run()[0] == plain


def test_the_weight_cache_ends_with_the_steps_own_region_inside_a_callers_one(h100: Device):
    def deaths() -> list[int | None]:
        step = Step(nn.Linear(8, 8), (torch.randn(2, 8),), lambda y: y.sum())
        trace = capture(step, h100, CaptureOptions())
        return [s.died for s in trace.storages if s.role == "autocast_cache"]

    plain = deaths()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert deaths() == plain


def test_autocast_that_the_model_enters_is_told(h100: Device):
    class Model(nn.Module):
        def __init__(self, device_type: str) -> None:
            super().__init__()
            self.lin, self.device_type = nn.Linear(4, 4), device_type

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(self.device_type, dtype=torch.bfloat16):
                return self.lin(x)

    for kind in ("cuda", "cpu"):
        step = Step(Model(kind), (torch.randn(2, 4),), lambda y: y.sum())
        trace = capture(step, h100, CaptureOptions(precision="fp32"))
        assert trace.settings["autocast_entered"] == [{"device_type": kind, "dtype": "bfloat16", "by": "model"}]
        assert any("taken as the target's" in note for note in trace.notes) == (kind == "cpu")
    step = Step(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(2, 4),), lambda y: y.sum())
    assert capture(step, h100, CaptureOptions(checkpoint="blocks")).settings["autocast_entered"] == []


def test_captures_of_several_threads_take_turns(h100: Device):
    from concurrent.futures import ThreadPoolExecutor

    def run(_: int) -> Trace:
        return capture(load_target("gpt2", seq=32), h100, CaptureOptions())

    want = run(0)
    with ThreadPoolExecutor(3) as pool:
        for trace in pool.map(run, range(3)):
            assert trace.storages == want.storages


def test_a_script_module_is_refused(h100: Device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(nn.Linear(4, 4), torch.randn(1, 4))
    with pytest.raises(UsageError, match="is a ScriptModule"):
        capture(Step(scripted, (torch.randn(2, 4),), lambda y: y.sum()), h100, CaptureOptions())
