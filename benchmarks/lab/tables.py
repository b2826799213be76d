"""Results as tables: one for each model, number of workers and rate, with every method side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from lab.options import Method, Rate
from lab.results import Arrival, Result, arrival, final_loss

NOTHING = "–"


def unshaped_of(cell: Result, results: Sequence[Result]) -> Result | None:
    """The unshaped run of the same method and model that came furthest."""
    same = [
        one
        for one in results
        if one.rate == "none"
        and (one.model, one.workers, one.method) == (cell.model, cell.workers, cell.method)
        and one.points
    ]
    return max(same, key=lambda one: len(one.points), default=None)


def tables(results: Sequence[Result], target: float | None) -> list[Table]:
    """The cells in the order in which they were first measured; repeats are put together."""
    places = dict.fromkeys((one.model, one.workers, one.rate, one.rtt_ms) for one in results)
    return [_table(place, results, target) for place in places]


def _table(place: tuple[str, int, str, float], results: Sequence[Result], target: float | None) -> Table:
    model, workers, rate, rtt_ms = place
    here = [one for one in results if (one.model, one.workers, one.rate, one.rtt_ms) == place]
    latency = f", RTT {rtt_ms:g} ms" if rtt_ms else ""
    table = Table(title=f"{model}, {workers} workers, {Rate.parse(rate)}{latency}", title_justify="left")
    for heading in ("method", escape("s/step median [min-max]"), "× local", "MB sent/step"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    if target is not None:
        table.add_column(f"to loss {target:g}", justify="right")
        table.add_column("DDP's ÷ this", justify="right")
    for heading in ("final loss", "held-out", "memory × parameters", "stall", "fresh", "steps"):
        table.add_column(heading, justify="right")
    methods = list(dict.fromkeys(one.method for one in here))
    floor = _median([one for one in here if one.method == "local"])
    ddp = _typical([one for one in here if one.method == "ddp"], results, target)
    for method in methods:
        cells = [one for one in here if one.method == method]
        table.add_row(*_row(method, cells, results, target, floor, ddp))
    return table


def _row(
    method: str,
    cells: Sequence[Result],
    results: Sequence[Result],
    target: float | None,
    floor: float | None,
    ddp: Arrival | None,
) -> list[str]:
    median = _median(cells)
    step_s = [second for one in cells for second in one.step_s]
    row = [method]
    row.append(f"{median:.3f} [{min(step_s):.3f}-{max(step_s):.3f}]" if median is not None else NOTHING)
    row.append(f"{median / floor:.2f}" if median is not None and floor else NOTHING)
    row.append(f"{statistics.fmean(one.sent_bytes_per_step for one in cells) / 1e6:.2f}")
    if target is not None:
        typical = _typical(cells, results, target)
        row.append(str(typical) if typical is not None else NOTHING)
        row.append(_ratio(ddp, typical))
    losses = [loss for one in cells if (loss := final_loss(one, unshaped_of(one, results))) is not None]
    row.append(str(sorted(losses, key=lambda loss: loss.loss)[len(losses) // 2]) if losses else NOTHING)
    held_out = [found for one in cells if (found := _held_out(one, unshaped_of(one, results))) is not None]
    row.append(held_out[len(held_out) // 2] if held_out else NOTHING)
    beyond = [one.beyond for one in cells if one.beyond is not None]
    row.append(f"{max(beyond):.2f}" if beyond else NOTHING)
    row += [_stall(cells), _fresh(cells)]
    ended = "; ".join(dict.fromkeys(one.ended for one in cells if one.ended))
    row.append(f"{min(len(one.points) for one in cells)}{f' ({ended})' if ended else ''}")
    return row


def _held_out(cell: Result, unshaped: Result | None) -> str | None:
    """Where the cell was cut, that of the unshaped run."""
    if cell.held_out is not None:
        return f"{cell.held_out:.3f}"
    return f"~{unshaped.held_out:.3f}" if unshaped is not None and unshaped.held_out is not None else None


def _median(cells: Sequence[Result]) -> float | None:
    step_s = [second for one in cells for second in one.step_s]
    return statistics.median(step_s) if step_s else None


def _typical(cells: Sequence[Result], results: Sequence[Result], target: float | None) -> Arrival | None:
    """The median of the repeats' arrivals."""
    if target is None:
        return None
    found = [one for cell in cells if (one := arrival(cell, unshaped_of(cell, results), target)) is not None]
    return sorted(found, key=lambda one: one.seconds)[len(found) // 2] if found else None


def _ratio(ddp: Arrival | None, this: Arrival | None) -> str:
    if ddp is None or this is None or this.seconds <= 0:
        return NOTHING
    mark = "~" if ddp.extrapolated or this.extrapolated else ""
    return f"{mark}{ddp.seconds / this.seconds:.1f}"


def _stall(cells: Sequence[Result]) -> str:
    shares = [one.statistics["stall_s"] / one.points[-1].at_s for one in cells if "stall_s" in one.statistics]
    return f"{statistics.median(shares):.1%}" if shares else NOTHING


def _fresh(cells: Sequence[Result]) -> str:
    shares = [one.statistics["fresh_share"] for one in cells if "fresh_share" in one.statistics]
    return f"{statistics.median(shares):.0%}" if shares else NOTHING


def wants_unshaped(results: Sequence[Result]) -> list[Result]:
    """One cell of each method whose figures need an unshaped run that there is not yet: it was ended too early."""
    wanting: dict[tuple[str, int, str], Result] = {}
    for cell in results:
        unshaped = unshaped_of(cell, results)
        has = unshaped is not None and not unshaped.ended
        if cell.ended and cell.step_s and not has and Method.parse(cell.method).name != "local":
            wanting.setdefault((cell.model, cell.workers, cell.method), cell)
    return list(wanting.values())
