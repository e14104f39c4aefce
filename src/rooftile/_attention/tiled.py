"""Exact attention tile by tile in plain torch operations: what runs where there is no compiled kernel.

Forward: the online softmax (Milakov & Gimelshein 2018) over key tiles, as in FlashAttention-2, algorithm 1. Backward:
scores are computed again from the LSE, tile by tile (algorithm 2). Memory beyond inputs and outputs is a few tiles.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rooftile._attention.call import Call, empty_output
from rooftile._attention.dropout import keep_factor, keep_mask
from rooftile._attention.kernel import Contract, Gradients, Kernel, Plan
from rooftile._attention.products import row_sum_product, visible_product
from rooftile._attention.tiles import KEY_TILE, ROW_TILE, Tile, tiles_of

__all__ = ["Tiled"]

#: Beyond this magnitude an LSE can't hold log(sum) beside the maximum (its spacing is 2^-10 of a unit in fp32), so the
#: backward pass takes the row's statistics anew. Rows of ``finfo.min`` are the case that matters.
_COARSE_LSE = 2.0**13


class Tiled(Kernel):
    """Online softmax in torch operations; slower than a compiled kernel, and always there."""

    name = "tiled"

    def refusals(self, call: Call, needs_grad: bool) -> tuple[str, ...]:
        """It takes every call."""
        return ()

    def forward(self, call: Call, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """``out`` and LSE."""
        out, lse = empty_output(call.q, call.v, out_dtype)
        for rows, tiles in tiles_of(call):
            top, sums, seen = _online_softmax(call, rows, tiles)
            numerator, total = sums[..., :-1], sums[..., -1:]
            if call.sinks is not None:
                top, shrink, own = _with_sinks(call, top)
                numerator, total = numerator * shrink, total * shrink + own
            empty = ~seen & (total == 0)
            out[:, :, rows] = (numerator / torch.where(empty, 1, total)).flatten(1, 2).to(out.dtype)
            lost = seen & (total == 0)  # every visible score is -inf: an input was infinite
            lse[:, :, rows] = torch.where(lost, torch.nan, top + torch.log(total)).flatten(1, 2).squeeze(-1)
        return out, lse

    def backward(
        self, call: Call, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, wanted: list[bool]
    ) -> Gradients:
        """dS = P (dP - D) with P from the LSE and D = rowsum(dO O) - dLSE."""
        return _Backward(call, out, lse, dout, dlse, wanted).run()

    def contract(self, call: Call) -> Contract:
        """fp32 for 16-bit and fp32 inputs, fp64 for fp64."""
        acc = str(call.accumulator).removeprefix("torch.")
        stored = str(call.q.dtype).removeprefix("torch.")
        return Contract(stored, acc, acc, stored, "the same bits at a fixed number of threads")

    def plan(self, call: Call) -> Plan:
        """The tiles that the intervals leave."""
        batch, heads, rows, _ = call.q.shape
        visited = sum((r.stop - r.start) * tile.width for r, tiles in tiles_of(call) for tile in tiles)
        return Plan("torch operations", min(rows, ROW_TILE), min(call.k.shape[2], KEY_TILE), batch * heads * visited)


def _grouped(x: Tensor, call: Call) -> Tensor:
    """(B, Hq or 1, ...) as (B, Hkv or 1, G or 1, ...)."""
    return x.unsqueeze(2) if x.shape[1] == 1 else x.unflatten(1, (-1, call.group))


def _sinks(call: Call) -> Tensor:
    """The sinks as (1, Hkv, G, 1, 1), in the accumulator's dtype."""
    sinks: Tensor = call.sinks  # type: ignore[assignment]  # asked for only where there are some
    return sinks.to(call.accumulator).view(1, -1, call.group, 1, 1)


def _with_sinks(call: Call, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The row maximum with the sink among the scores, what the sums so far shrink by, and the sink's own weight."""
    sink = _sinks(call)
    higher = torch.maximum(top, sink)
    safe = torch.where(higher == -torch.inf, 0, higher)
    return safe, torch.exp(top - safe), torch.exp(sink - safe)


def _folded_product(
    a: Tensor, x: Tensor, visible: Tensor | None, product: Callable[..., Tensor] = visible_product
) -> Tensor:
    """(B, Hkv, G, rows, n) @ (B, Hkv, n, d), the group folded into the rows, so K and V are read once for it."""
    group, rows = a.shape[2:4]
    if visible is not None:
        visible = visible.expand(a.shape).flatten(2, 3)
    return product(a.flatten(2, 3), x, visible).unflatten(2, (group, rows))


def _scores(call: Call, q: Tensor, k: Tensor, tile: Tile) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores (B, Hkv, G, rows, keys) with -inf where hidden, which pairs are visible, and tanh(s / softcap)."""
    s = _folded_product(q, k.mT, None) * call.scale
    capped = None
    if call.softcap:
        capped = torch.tanh(s / call.softcap)
        s = call.softcap * capped
    visible = tile.visible(call)
    if call.bias is not None:
        bias = _grouped(tile.part(call.bias), call)
        s = s + bias.to(s.dtype)
        shown = bias != -torch.inf
        if not bool(shown.all()):
            visible = shown if visible is None else visible & shown
    if visible is not None:
        s = torch.where(visible, s, -torch.inf)
    return s, visible, capped


def _online_softmax(call: Call, rows: slice, tiles: list[Tile]) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum of each row, its sums ``[sum(p v), sum(p)]`` and whether it sees any key; (B, Hkv, G, rows, .)."""
    acc = call.accumulator
    q = call.q[:, :, rows].to(acc).unflatten(1, (-1, call.group))
    shape = (*q.shape[:-1], 1)
    top = q.new_full(shape, -torch.inf)
    sums = q.new_zeros((*q.shape[:-1], call.v.shape[3] + 1))
    seen = torch.zeros(shape, dtype=torch.bool, device=q.device)
    for tile in tiles:
        s, visible, _ = _scores(call, q, call.k[:, :, tile.keys].to(acc), tile)
        higher = torch.maximum(top, s.amax(-1, keepdim=True))
        safe = torch.where(higher == -torch.inf, 0, higher)
        p = torch.exp(s - safe)
        if visible is not None:  # a row of NaN would leave NaN at its hidden pairs
            p = torch.where(visible, p, 0)
        v = call.v[:, :, tile.keys].to(acc)
        # The row sum as one more column of the product: both are then rounded alike, and V = 1 gives 1.
        part = _folded_product(
            _dropped(p, _kept(call, tile), call),
            torch.cat((v, v.new_ones(*v.shape[:-1], 1)), -1),
            visible,
            row_sum_product,
        )
        if call.seed is not None:
            part[..., -1:] = p.sum(-1, keepdim=True)
        sums = sums * torch.exp(top - safe) + part
        top = higher
        seen = seen | (True if visible is None else visible.any(-1, keepdim=True))
    return top, sums, seen


def _kept(call: Call, tile: Tile) -> Tensor | None:
    """Which pairs of the tile dropout keeps, (B, Hkv, G, rows, keys); None: no dropout."""
    if call.seed is None:
        return None
    (batch, heads), device = call.q.shape[:2], call.q.device
    keep = keep_mask(
        int(call.seed),
        call.dropout_p,
        torch.arange(batch * heads, device=device),
        torch.arange(tile.rows.start, tile.rows.stop, device=device),
        (tile.keys.start, tile.keys.stop),
    )
    return keep.unflatten(0, (batch, -1, call.group))


def _dropped(p: Tensor, keep: Tensor | None, call: Call) -> Tensor:
    return p if keep is None else torch.where(keep, p * keep_factor(call.dropout_p), 0)


class _Backward:
    """The backward pass: accumulators of the gradients, filled tile by tile."""

    def __init__(
        self, call: Call, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, wanted: list[bool]
    ) -> None:
        self.call, self.out, self.lse, self.dout, self.dlse = call, out, lse, dout, dlse
        acc = call.accumulator
        operands = (call.q, call.k, call.v, call.bias, call.sinks)
        self.grads = [
            torch.zeros(x.shape, dtype=acc, device=x.device) if want and x is not None else None
            for x, want in zip(operands, wanted, strict=True)
        ]

    def run(self) -> Gradients:
        """All tiles, then each gradient in its input's dtype and order in memory."""
        for rows, tiles in tiles_of(self.call):
            self._rows(rows, tiles)
        call = self.call
        operands = (call.q, call.k, call.v, call.bias, call.sinks)
        made = [
            call.q.new_empty(0) if grad is None or x is None else torch.empty_like(x).copy_(grad)
            for grad, x in zip(self.grads, operands, strict=True)
        ]
        return made[0], made[1], made[2], made[3], made[4]

    def _of_rows(self, x: Tensor, rows: slice) -> Tensor:
        return x[:, :, rows].to(self.call.accumulator).unflatten(1, (-1, self.call.group))

    def _rows(self, rows: slice, tiles: list[Tile]) -> None:
        """One tile of rows against all of its keys."""
        call = self.call
        q, lse = self._of_rows(call.q, rows), self._of_rows(self.lse.unsqueeze(-1), rows)
        dout = None if self.dout is None else self._of_rows(self.dout, rows)
        d = torch.zeros_like(lse) if dout is None else (dout * self._of_rows(self.out, rows)).sum(-1, keepdim=True)
        if self.dlse is not None:
            d = d - self._of_rows(self.dlse.unsqueeze(-1), rows)
        top, divisor = self._statistics(rows, tiles, lse)
        dq, dk, dv, dbias, dsinks = self.grads
        for tile in tiles:
            k, v = (x[:, :, tile.keys].to(call.accumulator) for x in (call.k, call.v))
            s, visible, capped = _scores(call, q, k, tile)
            p = torch.exp(s - top) / divisor
            if visible is not None:
                p = torch.where(visible, p, 0)
            dp = torch.zeros_like(p)
            if dout is not None:
                keep = _kept(call, tile)
                dp = _dropped(_folded_product(dout, v.mT, None), keep, call)
                if dv is not None:
                    dv[:, :, tile.keys] += _over_group(_dropped(p, keep, call), dout, visible)
            ds = p * (dp - d)
            if visible is not None:
                ds = torch.where(visible, ds, 0)
            if dbias is not None:
                part = tile.part(dbias)
                part += ds.flatten(1, 2).sum_to_size(part.shape)
            ds = (ds if capped is None else ds * (1 - capped**2)) * call.scale
            if dq is not None:
                dq[:, :, rows] += _folded_product(ds, k, visible).flatten(1, 2)
            if dk is not None:
                dk[:, :, tile.keys] += _over_group(ds, q, visible)
        if dsinks is not None and call.sinks is not None:
            share = torch.exp(_sinks(call) - lse)
            share = torch.where(lse == -torch.inf, 0, share)
            dsinks -= (share * torch.where(share == 0, 0, d)).flatten(1, 2).sum((0, 2, 3))

    def _statistics(self, rows: slice, tiles: list[Tile], lse: Tensor) -> tuple[Tensor, Tensor | float]:
        """What to subtract from the scores and to divide by: the LSE and 1, unless the LSE is too coarse for that."""
        usable = torch.where(lse == -torch.inf, 0, lse)
        if not bool(((usable.abs() > _COARSE_LSE) & usable.isfinite()).any()):
            return usable, 1.0
        top, sums, seen = _online_softmax(self.call, rows, tiles)
        total = sums[..., -1:]
        if self.call.sinks is not None:
            top, shrink, own = _with_sinks(self.call, top)
            total = total * shrink + own
        return torch.where(seen, top, 0), torch.where(~seen & (total == 0), 1, total)


def _over_group(a: Tensor, x: Tensor, visible: Tensor | None) -> Tensor:
    """``a^T x`` summed over the group: (B, Hkv, G, rows, keys), (B, Hkv, G, rows, d) -> (B, Hkv, keys, d)."""
    if visible is not None:
        visible = visible.expand(a.shape).flatten(2, 3).mT
    return visible_product(a.flatten(2, 3).mT, x.flatten(2, 3), visible)
