"""The study as text: what was measured, what was claimed, what a token weighs."""

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from runtime.models import MODELS
from runtime.study import CLAIMS
from runtime.waste import Waste

HEADERS = (
    "allocator",
    "utilisation",
    "tokens",
    "internal",
    "external",
    "free",
    "at once (mean)",
    "(most)",
    "preemptions",
    "tokens copied",
    f"GB of {MODELS[0].name}",
    "rejected",
)


def waste_table(rows: Iterable[Waste]) -> str:
    """One trace, an allocator a line; shares in percent of the pool, utilisation of what is reserved."""
    lines = [
        (
            row.allocator,
            *(f"{100 * share:.1f}%" for share in (row.utilisation, row.tokens, row.internal, row.external, row.free)),
            f"{row.mean_running:.1f}",
            row.max_running,
            f"{row.num_preemptions:,}",
            f"{row.copied_tokens:,}",
            f"{row.copied_tokens * MODELS[0].token_bytes / 1e9:,.0f}",
            row.num_rejected,
        )
        for row in rows
    ]
    align = ("left", *("right",) * (len(HEADERS) - 1))
    return _markdown(lines, headers=HEADERS, align=align)


def claims_table() -> str:
    """What others say that utilisation is."""
    lines = [(claim.who, claim.what, f"{100 * claim.utilisation:.1f}%") for claim in CLAIMS]
    return _markdown(lines, headers=("claimed by", "for", "utilisation"))


def models_table() -> str:
    """Bytes a token, and of a whole context, by model."""
    lines = [
        (
            model.name,
            model.num_layers,
            model.num_kv_heads,
            model.head_dim,
            f"{model.token_bytes:,}",
            f"{4096 * model.token_bytes / 1e9:.2f} GB",
            f"{131_072 * model.token_bytes / 1e9:.1f} GB",
        )
        for model in MODELS
    ]
    headers = ("model", "layers", "KV heads", "head_dim", "bytes a token", "at 4,096", "at 131,072")
    align = ("left", *("right",) * 6)
    return _markdown(lines, headers=headers, align=align)


def _markdown(lines: Sequence[Sequence[object]], *, headers: Sequence[str], align: Sequence[str] | None = None) -> str:
    """A table in GitHub's Markdown, of text that is already formatted."""
    return str(tabulate(lines, headers=headers, tablefmt="github", colalign=align, disable_numparse=True))
