"""Train one small GPT under seven precisions and see which ones hold.

    python examples/train_small_gpt.py                     # about 10 minutes on two cores
    python examples/train_small_gpt.py --quick             # seconds: shows that it runs, not what holds
    python examples/train_small_gpt.py --plot precisions.png --json precisions.json

The text is English that every Python has: the language reference in ``pydoc_data.topics``, one token a byte. For each
seed all precisions start from the same weights and see the same batches, so a difference from FP32 is the precision's.

* ``fp32``           everything in FP32.
* ``bf16-autocast``  FP32 weights, products in BF16.
* ``bf16-pure``      weights, gradients and AdamW's state in BF16, no master weights.
* ``fp16``           FP16 weights and gradients, FP32 masters, no loss scaling.
* ``fp16-scaled``    the same with loss scaling, started from the window of one backward pass.
* ``fp8-tensor``     the blocks' linear layers in FP8, one scale a tensor (E4M3, gradients E5M2); the rest as autocast.
* ``deepseek-v3``    the same with 1x128 tiles and 128x128 blocks, E4M3 throughout, FP32 accumulation.

What it shows: how far each precision's loss ends from FP32's, against the spread between seeds; which share of the
gradients its 16 or 8 bits flush to zero; which share of the weight updates rounding swallows.
What it does not show: that a recipe holds for a large model or a long run, where outliers are larger and small biases
have more time to add up; and anything about speed, since the FP8 products are simulated on the CPU (decoded operands,
FP32 product). A difference inside the seeds' spread is no difference.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftile import lowp
from rooftile.formats import exponent_histogram, flushed, swallowed_updates

PRECISIONS = ("fp32", "bf16-autocast", "bf16-pure", "fp16", "fp16-scaled", "fp8-tensor", "deepseek-v3")


@dataclass(frozen=True)
class Size:
    """How large the run is."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    seeds: int
    learning_rate: float = 1e-3


FULL = Size(layers=3, width=128, heads=4, context=128, batch=8, steps=200, seeds=3)
QUICK = Size(layers=1, width=32, heads=2, context=32, batch=4, steps=6, seeds=1)


@dataclass(frozen=True)
class Run:
    """One training: loss by step, validation loss at the end (FP32 evaluation), and what the numbers lost."""

    precision: str
    seed: int
    losses: list[float]
    validation: float
    flushed: float
    swallowed: float
    skipped: int
    seconds: float


class TensorCoreLinear(nn.Linear):
    """Operands and result in the input's dtype, the sum in FP32, as matrix units do it."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList([Block(size.width, size.heads) for _ in range(size.layers)])
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text() -> tuple[Tensor, Tensor, int]:
    """Training bytes, held-out bytes (the last tenth) as token ids, and the vocabulary's size."""
    from pydoc_data.topics import topics

    raw = "\n".join(topics[name] for name in sorted(topics)).encode()
    used = sorted(set(raw))
    ids = torch.tensor([used.index(byte) for byte in range(256) if byte in used])
    table = torch.zeros(256, dtype=torch.long)
    table[torch.tensor(used)] = ids
    tokens = table[torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()]
    split = len(tokens) * 9 // 10
    return tokens[:split], tokens[split:], len(used)


def batches(tokens: Tensor, size: Size, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - size.context - 1, (size.batch,), generator=generator)
        rows = torch.stack([tokens[s : s + size.context + 1] for s in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).float().flatten(0, 1), targets.flatten())


def adamw(size: Size) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=size.learning_rate, weight_decay=0.01)


def train(precision: str, size: Size, seed: int, train_ids: Tensor, held_out: Tensor, vocabulary: int) -> Run:
    """One run; everything that differs between precisions is in this function."""
    started = time.perf_counter()
    torch.manual_seed(seed)
    model = GPT(size, vocabulary)
    data = batches(train_ids, size, seed)
    region: Callable[[], AbstractContextManager[Any]] = nullcontext
    scaler: lowp.LossScaler | None = None
    scale = 1.0
    if precision in ("bf16-autocast", "fp8-tensor", "deepseek-v3"):
        region = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
    if precision in ("fp8-tensor", "deepseek-v3"):
        lowp.convert(model, precision)
    if precision == "fp16-scaled":
        scale = _first_scale(model, *next(batches(train_ids, size, seed)))
    if precision == "bf16-pure":
        model.bfloat16()
    optimizer: torch.optim.Optimizer | lowp.MasterWeights
    if precision.startswith("fp16"):
        model.half()
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = TensorCoreLinear
        optimizer = lowp.MasterWeights(model.parameters(), adamw(size))
        if precision == "fp16-scaled":
            scaler = lowp.LossScaler(model.named_parameters(), initial=scale, floor=2.0**-8, device="cpu")
    else:
        optimizer = adamw(size)(model.parameters())
    losses = []
    for _ in range(size.steps):
        ids, targets = next(data)
        with region():
            loss = loss_of(model, ids, targets)
        losses.append(float(loss.detach()))
        update(loss, model, optimizer, scaler)
    shares = flushed_share(precision, model, scaler, *next(data)), swallowed_share(precision, model, size, next(data))
    validation = evaluate(model, held_out, size)
    skipped = len(scaler.skipped) if scaler is not None else 0
    return Run(precision, seed, losses, validation, *shares, skipped, time.perf_counter() - started)


def _first_scale(model: nn.Module, ids: Tensor, targets: Tensor) -> float:
    with lowp.watch_gradients(model) as watch:
        loss_of(model, ids, targets).backward()
    model.zero_grad(set_to_none=True)
    return lowp.initial_scale(watch)[0]


def update(
    loss: Tensor,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | lowp.MasterWeights,
    scaler: lowp.LossScaler | None,
) -> None:
    """Backward, clip, step, in the right order with and without a scaler."""
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(optimizer)
    if isinstance(optimizer, lowp.MasterWeights):
        if scaler is None:
            optimizer.take_gradients()
        nn.utils.clip_grad_norm_([master for _, master in optimizer.pairs], 1.0)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Tensor, size: Size) -> float:
    """Loss of the trained weights on held-out text, computed in FP32 for every precision."""
    plain = wide_copy(model)
    data = batches(held_out, size, seed=0)
    return statistics.mean(float(loss_of(plain, *next(data))) for _ in range(8))


def wide_copy(model: nn.Module) -> nn.Module:
    """The same weights in FP32 and in plain linear layers."""
    wide = copy.deepcopy(model).float()
    for name, module in list(wide.named_modules()):
        if isinstance(module, lowp.BlockScaledLinear):
            plain = nn.Linear(module.in_features, module.out_features)
            plain.weight, plain.bias = module.weight, module.bias
            parent, _, leaf = name.rpartition(".")
            setattr(wide.get_submodule(parent), leaf, plain)
    return wide


def flushed_share(
    precision: str, model: nn.Module, scaler: lowp.LossScaler | None, ids: Tensor, targets: Tensor
) -> float:
    """Share of the non-zero gradients at the linear layers' outputs, computed in FP32, that the precision flushes."""
    wide = wide_copy(model)
    grads: list[Tensor] = []

    def watch(module: nn.Module, _inputs: object, output: Tensor) -> None:
        if module is not wide.head:
            output.register_hook(lambda g: grads.append(g.detach()))

    for module in wide.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(watch)
    loss_of(wide, ids, targets).backward()
    lost = total = 0.0
    for grad in grads:
        if precision in lowp.LAYER_RECIPES:
            row = lowp.score(grad, [lowp.layer_recipe(precision).gradient]).rows[0]
            lost, total = lost + row.flushed, total + row.nonzero
        else:
            fmt = "fp32" if precision == "fp32" else precision[:4]
            bound = flushed(exponent_histogram(grad), fmt, scaler.scale_value if scaler is not None else 1.0)
            lost, total = lost + (bound.low + bound.high) / 2, total + bound.of
    return lost / total if total else 0.0


def swallowed_share(precision: str, model: nn.Module, size: Size, batch: tuple[Tensor, Tensor]) -> float:
    """Share of the non-zero updates of one first AdamW step from here that leave the *updated* weight as it was.

    The updated weight is BF16 in ``bf16-pure`` and FP32 (the parameter or its master) everywhere else.
    """
    wide = wide_copy(model)
    before = [p.detach().clone() for p in wide.parameters()]
    loss_of(wide, *batch).backward()
    # A tenth of the rate: what a schedule has come down to when the small updates matter.
    torch.optim.AdamW(wide.parameters(), lr=size.learning_rate / 10, weight_decay=0.0).step()
    fmt = "bf16" if precision == "bf16-pure" else "fp32"
    counts = [swallowed_updates(old, p.detach() - old, fmt) for old, p in zip(before, wide.parameters(), strict=True)]
    tried = sum(c.swallowed + c.effective for c in counts)
    return sum(c.swallowed for c in counts) / tried if tried else 0.0


def table(runs: list[Run]) -> str:
    """One row a precision; differences are seed by seed, then averaged."""
    base = {run.seed: run.validation for run in runs if run.precision == "fp32"}
    lines = [
        f"{'precision':14s} {'held-out loss':>16s} {'minus fp32':>18s} {'flushed':>9s} {'swallowed':>10s} "
        f"{'skipped':>8s} {'seconds':>8s}"
    ]
    for precision in dict.fromkeys(run.precision for run in runs):
        mine = [run for run in runs if run.precision == precision]
        loss, differences = [r.validation for r in mine], [r.validation - base[r.seed] for r in mine]
        lines.append(
            f"{precision:14s} {_spread(loss, '.4f'):>16s} {_spread(differences, '+.4f'):>18s} "
            f"{statistics.mean(r.flushed for r in mine):9.2%} {statistics.mean(r.swallowed for r in mine):10.2%} "
            f"{sum(r.skipped for r in mine):8d} {statistics.mean(r.seconds for r in mine):8.1f}"
        )
    return "\n".join(lines)


def _spread(values: list[float], form: str) -> str:
    mean = statistics.mean(values)
    return f"{mean:{form}} ±{statistics.stdev(values):.4f}" if len(values) > 1 else f"{mean:{form}}"


def smoothed(losses: list[float], window: int) -> list[float]:
    return [statistics.mean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]


def draw(runs: list[Run], path: Path) -> None:
    """Loss against step, and below it the difference from FP32 with the seeds' spread as a band."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'rooftile[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    window = max(1, len(runs[0].losses) // 15)
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 8), sharex=True, layout="constrained")
    curves = {(r.precision, r.seed): smoothed(r.losses, window) for r in runs}
    seeds = sorted({r.seed for r in runs})
    for precision in dict.fromkeys(r.precision for r in runs):
        mean = [statistics.mean(values) for values in zip(*(curves[precision, s] for s in seeds), strict=True)]
        upper.plot(mean, label=precision)
        gaps = [[a - b for a, b in zip(curves[precision, s], curves["fp32", s], strict=True)] for s in seeds]
        middle = [statistics.mean(values) for values in zip(*gaps, strict=True)]
        low, high = ([pick(values) for values in zip(*gaps, strict=True)] for pick in (min, max))
        (line,) = lower.plot(middle)
        lower.fill_between(range(len(middle)), low, high, alpha=0.15, color=line.get_color())
    upper.set_ylabel(f"training loss (mean of {window} steps)")
    lower.set_ylabel("minus fp32 (band: lowest and highest seed)")
    lower.set_xlabel("step")
    finite = [abs(v) for r in runs for v in (r.validation,) if math.isfinite(v)]
    lower.set_ylim(-0.3, 0.6) if finite and max(finite) > 10 else None
    upper.legend()
    figure.savefig(path)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> list[Run]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="fp32 is always run")
    parser.add_argument("--plot", type=Path, metavar="out.png|svg")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    wanted = [name.strip() for name in options.precisions.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in PRECISIONS]
    if unknown:
        raise SystemExit(f"no precision is called {unknown[0]!r}; choose from {', '.join(PRECISIONS)}")
    size = QUICK if options.quick else FULL
    train_ids, held_out, vocabulary = text()
    runs = []
    for seed in range(size.seeds):
        for precision in dict.fromkeys(["fp32", *wanted]):
            run = train(precision, size, seed, train_ids, held_out, vocabulary)
            runs.append(run)
            print(f"seed {seed} {precision:14s} loss {run.losses[-1]:.4f} held-out {run.validation:.4f}", flush=True)
    print(f"\n{len(train_ids):,} training bytes, {size}\n\n{table(runs)}\n")
    print("flushed: of non-zero gradients at linear outputs; swallowed: of one AdamW step at a tenth of the rate")
    print("± is the standard deviation over seeds; a difference inside it is none")
    print("not shown: long runs, large models, speed (FP8 products are simulated on the CPU)")
    if options.plot is not None:
        draw(runs, options.plot)
    if options.json is not None:
        options.json.write_text(json.dumps({"size": asdict(size), "runs": [asdict(run) for run in runs]}) + "\n")
    return runs


if __name__ == "__main__":
    main()
