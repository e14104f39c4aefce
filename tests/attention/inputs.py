"""Named inputs: everything that a call may be made of, from one frozen record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .oracle import Problem
from .visibility import KINDS, Sizes


@dataclass(frozen=True)
class Case:
    """One call. ``values`` is a kind of numbers (see :func:`operands`), ``mask`` a key of ``visibility.KINDS``,
    ``bias`` which of the four axes (B, Hq, Lq, Lk) it has, as a string of their letters ("bhqk", "hk", ...); with
    ``holes`` a third of it is -inf, its first row altogether.
    """

    q_len: int
    kv_len: int
    head_dim: int = 64
    value_dim: int | None = None
    heads: tuple[int, int] = (2, 2)
    batch: int = 1
    dtype: torch.dtype = torch.float32
    values: str = "gaussian"
    mask: str | None = None
    bias: str | None = None
    holes: bool = False
    softcap: float | None = None
    sinks: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    seed: int = 0

    def __str__(self) -> str:
        parts = [str(self.dtype).removeprefix("torch."), f"{self.q_len}x{self.kv_len}", f"d{self.head_dim}"]
        parts += [f"dv{self.value_dim}"] if self.value_dim else []
        parts += [f"{self.batch}x{self.heads[0]}" + (f"g{self.heads[1]}" if self.heads[0] != self.heads[1] else "")]
        parts += [self.values] if self.values != "gaussian" else []
        parts += [self.mask.replace(" ", "")] if self.mask else []
        parts += [f"bias_{self.bias}" + ("_holes" if self.holes else "")] if self.bias else []
        parts += ["softcap"] if self.softcap else []
        parts += ["sinks"] if self.sinks else []
        parts += ["dropout"] if self.dropout_p else []
        return "-".join(parts)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.batch, self.q_len, self.kv_len)

    def generator(self) -> torch.Generator | None:
        """Where the call takes its dropout seed from."""
        return torch.Generator().manual_seed(self.seed) if self.dropout_p else None

    @property
    def wanted(self) -> tuple[str, ...]:
        """The gradients that the case has."""
        return ("dq", "dk", "dv", *(("dbias",) if self.bias else ()), *(("dsinks",) if self.sinks else ()))

    def build_mask(self) -> Any:
        """The package's mask, None for none."""
        return KINDS[self.mask].build(self.sizes) if self.mask else None

    def problem(self) -> Problem:
        generator = torch.Generator().manual_seed(1000 + self.seed)
        q, k, v = operands(self, generator)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        bias = None
        if self.bias:
            full = {"b": self.batch, "h": self.heads[0], "q": self.q_len, "k": self.kv_len}
            bias = normal(*(size if axis in self.bias else 1 for axis, size in full.items())).to(self.dtype)
            if self.holes:
                bias[torch.rand(bias.shape, generator=generator) < 0.3] = -torch.inf
                bias[:, :, 0] = -torch.inf
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return Problem(
            q, k, v,
            dout=normal(*q.shape[:3], v.shape[3]).to(self.dtype),
            dlse=normal(*q.shape[:3]).to(wide),
            visible=KINDS[self.mask].predicate(self.sizes) if self.mask else None,
            bias=bias,
            sinks=normal(self.heads[0]).to(self.dtype).to(wide) if self.sinks else None,
            scale=self.scale,
            softcap=self.softcap,
            dropout_p=self.dropout_p,
            seed=drawn_seed(self.generator()) if self.dropout_p else 0,
        )  # fmt: skip


def drawn_seed(generator: torch.Generator | None) -> int:
    """The 63 bits that a call takes from a generator in this state."""
    return int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, generator=generator))


def operands(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv) of one kind of numbers:

    - ``gaussian``: what a layer sees at its start.
    - ``banded``: position waves; a query meets the keys near its own position (largest score 12).
    - ``one_hot``: a query meets every D-th key, all others not at all.
    - ``constant``: all keys, and all values, the same: every probability 1 / Lk, every gradient of q zero.
    - ``outlier``: Gaussian with two channels of q and k, and one of v, a hundred times as large: scores up to 1e4.
    """
    value_dim = case.value_dim or case.head_dim
    shapes = [
        (case.batch, case.heads[0], case.q_len, case.head_dim),
        (case.batch, case.heads[1], case.kv_len, case.head_dim),
        (case.batch, case.heads[1], case.kv_len, value_dim),
    ]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    channel = torch.arange(case.head_dim)
    peak = 12 * math.sqrt(case.head_dim)  # a product of q and k with this sum has the score 12
    rows, keys = torch.arange(case.q_len)[:, None] + case.sizes.offset, torch.arange(case.kv_len)[:, None]
    if case.values == "banded":
        frequency = 2.0 ** -(channel // 2 % 8).double()
        waves = [torch.cos(position * frequency - channel % 2 * math.pi / 2) for position in (rows, keys)]
        q, k = (0.02 * x + math.sqrt(2 * peak / case.head_dim) * wave for x, wave in zip((q, k), waves, strict=True))
    elif case.values == "one_hot":
        q, k = (math.sqrt(peak) * (position % case.head_dim == channel).double() for position in (rows, keys))
        v = keys % value_dim == torch.arange(value_dim)
        q, k, v = (x.expand(shape) for x, shape in zip((q, k, v), shapes, strict=True))
    elif case.values == "constant":
        k, v = torch.full(shapes[1], 0.3), torch.full(shapes[2], 0.7)
    elif case.values == "outlier":
        factor = 100 * (case.head_dim / 64) ** 0.25  # for any head dim the scores of head dim 64
        large = torch.where((channel == 1) | (channel == case.head_dim - 1), factor, 1.0)
        q, k, v = q * large, k * large, v * torch.where(torch.arange(value_dim) == 0, 100.0, 1.0)
    elif case.values != "gaussian":
        raise ValueError(f"no values called {case.values!r}")
    return q.to(case.dtype), k.to(case.dtype), v.to(case.dtype)
