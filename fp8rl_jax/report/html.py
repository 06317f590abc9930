"""What pages and plots of every report share: style, tables, and figures inside the page."""

from __future__ import annotations

import base64
import html
import io
import json
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fp8rl_jax.base.errors import visible
from fp8rl_jax.base.whole_file import write_whole
from fp8rl_jax.report.summary import MISSING

# Okabe and Ito's palette: distinct to colour-blind readers.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#888888")
_LONGEST = 100_000  # characters of a cell or of the configuration
_LONGEST_LABEL = 80
_LARGEST = 1e30
_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">"""
_CSS = """
:root{--bg:#fafaf8;--fg:#22262a;--soft:#626a72;--line:#dcdfe2;--card:#fff;--mark:#0072b2}
@media(prefers-color-scheme:dark){:root{--bg:#17191c;--fg:#e4e6e8;--soft:#9aa3ab;--line:#363b40;
--card:#1f2226;--mark:#6bb8e8}} html{color-scheme:light dark} *{box-sizing:border-box}
body{margin:0 auto;padding:2rem 1.5rem 4rem;max-width:1120px;background:var(--bg);color:var(--fg);
font:16px/1.55 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif} h1{margin:0 0 .5rem}
h2{font-size:1.2rem;margin:2.5rem 0 .7rem} .soft,figcaption{color:var(--soft);font-size:.9rem}
.notes{border-left:4px solid #d55e00;padding:.5rem 1rem .5rem 2rem;background:var(--card)}
.scroll{overflow-x:auto;margin:.7rem 0} figure{margin:0 0 1rem} figcaption{margin-top:.4rem}
table{border-collapse:collapse;width:100%;background:var(--card);font-size:.92rem}
th,td{text-align:left;vertical-align:top;padding:.4rem .75rem;border:1px solid var(--line)}
thead th{border-bottom:2px solid var(--mark)} td:first-child{min-width:9rem}
.num :is(td,th):not(:first-child){text-align:right;font-variant-numeric:tabular-nums}
.num td:not(:first-child){white-space:nowrap} .lead{font-size:1.08rem}
img{display:block;width:100%;background:#fff;border:1px solid var(--line);border-radius:8px}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;max-height:18rem;overflow-y:auto;
font:13px/1.45 ui-monospace,"DejaVu Sans Mono",Menlo,monospace}
"""


def write_page(path: pathlib.Path, title: str, body: str) -> pathlib.Path:
    """Writes a page, whole or not at all, and returns its path; `title` is its heading too."""
    title = text_html(title)
    page = f"{_HEAD}<title>{title}</title><style>{_CSS}</style></head>"
    page += f"<body><h1>{title}</h1>{body}</body></html>"
    write_whole(path, page)
    return path


def panels_of(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with `count` plots in its style, each `height` inches high."""
    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(11, height * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(count)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(color="#e6e6e6", lw=0.7)
        ax.set_axisbelow(True)
        ax.set_xlabel("step")
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, axes


def draw_line(ax: Axes, steps: np.ndarray, values: np.ndarray, index: int, **style) -> None:
    """Draws the `index`-th line of a plot, without what is too large for one."""
    values = drawable(values)
    if "label" in style:
        style["label"] = label_text(style["label"])
    marker = "o" if len(steps) <= 40 else None  # a run of one step must show too
    style = {"color": COLOURS[index % len(COLOURS)], "lw": 1.6, "marker": marker, "ms": 3} | style
    ax.plot(steps, values, **style)


def drawable(values: np.ndarray) -> np.ndarray:
    """The values, NaN in the place of those whose axis could not be divided."""
    return np.where(np.abs(values) < _LARGEST, values, np.nan)


def label_text(text: str) -> str:
    """A label as plain text, which matplotlib would otherwise read as TeX between two $."""
    return visible(text)[:_LONGEST_LABEL].replace("$", r"\$")


def figure_html(figure: Figure | None, caption: str) -> str:
    """The figure as an image in the page, or a sentence that it is missing."""
    if figure is None:
        return f'<p class="soft">{MISSING.capitalize()} in this run.</p>'
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    data, text = base64.b64encode(buffer.getvalue()).decode("ascii"), html.escape(caption)
    image = f'<img alt="{text}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"


def text_html(value: object) -> str:
    """HTML-escaped text, control characters and marks of direction made visible, its middle left
    out where it is longer than a page can show."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        left_out = f"\n[... {len(text) - 2 * half:,} characters left out ...]\n"
        text = text[:half] + left_out + text[-half:]
    return html.escape(visible(text))


def table_html(
    head: Sequence, rows: Iterable[Sequence], style: str = "num", cell: str = "{}"
) -> str:
    """A table of escaped cells, each put into the template `cell`."""
    titles = "".join(f"<th>{text_html(x)}</th>" for x in head)
    titles = f"<thead><tr>{titles}</tr></thead>" if head else ""
    lines = ("".join(f"<td>{cell.format(text_html(x))}</td>" for x in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table class="{style}">{titles}<tbody>{body}</tbody></table></div>'
