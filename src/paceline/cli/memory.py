"""What memory goes to where layers are read while they are used, said once when the model is loaded."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from paceline.cli.display import error_console
from paceline.engines.memory import MemoryPlan
from paceline.sizes import format_bytes, format_memory


def print_memory_plan(plan: MemoryPlan) -> None:
    """Print what goes to what, and what a pass reads and takes."""
    console = error_console()
    table = Table(box=None, show_header=False, pad_edge=False, style="dim")
    table.add_column()
    table.add_column(justify="right")
    layers_bytes = plan.resident_bytes + plan.pass_bytes
    rows = (
        (f"layers that stay, of {format_bytes(layers_bytes)}", plan.resident_bytes),
        ("other weights of the model", plan.others_bytes),
        ("ring that the other layers go through", plan.ring_bytes),
        ("draft model", plan.draft_bytes),
        ("text in the cache, and scratch", plan.working_bytes),
        ("what finished requests have read", plan.prompts_bytes),
        ("Python", plan.process_bytes),
        ("spare", plan.spare_bytes),
    )
    for name, num_bytes in rows:
        if num_bytes:
            table.add_row(name, format_bytes(num_bytes))
    console.print(f"{format_memory(plan.total_bytes)} of memory go to", style="dim", markup=False)
    console.print(table)
    all_experts = f", all {plan.experts} experts of each layer among them" if plan.experts else ""
    past = "" if plan.is_direct else "; this file system has no reads past the page cache, which costs some of it"
    console.print(
        f"every pass reads {format_bytes(plan.pass_bytes)}{all_experts}, at {format_bytes(int(plan.bytes_per_s))}/s: "
        f"{plan.pass_s:.2g} s for a token without drafts{past}",
        style="dim",
        markup=False,
    )


def memory_json(plan: MemoryPlan) -> dict[str, Any]:
    """Return a memory plan as plain data, in bytes and seconds."""
    return {
        "total_bytes": plan.total_bytes,
        "resident_bytes": plan.resident_bytes,
        "others_bytes": plan.others_bytes,
        "ring_bytes": plan.ring_bytes,
        "draft_bytes": plan.draft_bytes,
        "working_bytes": plan.working_bytes,
        "prompts_bytes": plan.prompts_bytes,
        "process_bytes": plan.process_bytes,
        "spare_bytes": plan.spare_bytes,
        "pass_bytes": plan.pass_bytes,
        "bytes_per_s": plan.bytes_per_s,
        "is_direct": plan.is_direct,
    }
