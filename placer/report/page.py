"""Reports as self-contained HTML files, without scripts or external references."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from placer.report.charts import STYLE, Bar, Chart, bars, columns, drawing
from placer.report.cluster import cluster_table
from placer.report.estimate import headline, remarks
from placer.report.explain import mode_text, proven, segment_texts
from placer.report.pictures import bar_keys, device_bars, estimate_bars, layer_charts, placed_chart
from placer.report.rendering import PAGE_WIDTH, plain_text
from placer.schema import Cluster, Estimate, Placement, PlacementRequest, Profile
from placer.schema.placement import holders
from placer.utils.units import Text, bytes_text, count_text, ms_text

# rows of a table, so that browsers stay responsive
_MOST_ROWS = 5_000

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" \
content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>
:root{{color-scheme:light dark;--back:light-dark(#fff,#14171a);--text:light-dark(#16191d,#e8eaed);
--faint:light-dark(#57606a,#a3adb8);--line:light-dark(#c9d1d9,#3d464f)}}
body{{margin:0 auto;max-width:70rem;padding:1.2rem;background:var(--back);color:var(--text);
font:16px/1.45 system-ui,sans-serif}}
h1{{font-size:1.5rem}}h2{{font-size:1.15rem;margin:1.6rem 0 .4rem}}
table{{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}}
th,td{{text-align:right;padding:.2rem .7rem;border-bottom:1px solid var(--line)}}
td{{white-space:nowrap}}
th:first-child,td:first-child{{text-align:left;white-space:normal;\
min-width:12rem;overflow-wrap:anywhere}}
.scroll{{overflow-x:auto}}pre{{overflow-x:auto;font-size:.85rem}}
.key{{display:inline-block;margin-right:1.2rem;font-size:.9rem}}
.key svg{{display:inline-block;width:.8rem;height:.8rem;margin-right:.35rem}}
{style}</style></head><body><main><h1>{title}</h1>{body}</main></body></html>
"""


def html_report(
    subject: Profile | Placement | PlacementRequest | Cluster | Estimate,
    profile: Profile | None = None,
) -> str:
    """Return a report with figures, charts of time and memory, and every layer.

    Args:
        subject: what to show; of a request, its profile.
        profile: the profile that a placement was made from. Its layers are shown in the colours of
            their devices. Times of another micro-batch size do not apply to the placement; they are
            left out, with a note.

    Returns:
        One self-contained HTML document.
    """
    if isinstance(subject, PlacementRequest):
        subject = subject.profile
    if isinstance(subject, Placement):
        return page(f"Placement of {subject.model or 'model'}", _placement(subject, profile))
    if isinstance(subject, Estimate):
        return page(f"Estimate of {subject.model or 'model'}", _estimate(subject))
    if isinstance(subject, Profile):
        return page(f"Profile of {subject.model or 'model'}", _profile(subject))
    return page("Devices and links", _cluster(subject))


def page(title: str, sections: Iterable[str]) -> str:
    """Return a document around sections of HTML."""
    return _PAGE.format(title=escape(title), body="".join(sections), style=STYLE)


def _profile(profile: Profile) -> list[str]:
    facts = [
        mode_text(profile),
        f"{count_text(len(profile.layers), 'layer')}, cut as {profile.granularity}",
    ]
    if not profile.captured:
        facts.append(f"runs through hooks: {profile.not_captured_because}")
    facts.append(", ".join(f"{name} {version}" for name, version in profile.versions.items()))
    sections = [
        _list(facts),
        *(_columns(chart) for chart in layer_charts(profile)),
        _layers(profile),
    ]
    return sections + (_cluster(profile.cluster) if profile.cluster else [])


def _placement(placement: Placement, profile: Profile | None) -> list[str]:
    facts = proven(placement)
    if not placement.layer_devices:
        return [_list(facts)]
    sections = [_list([*facts, *segment_texts(placement)])]
    sections += [_bars(*chart) for chart in device_bars(placement)]
    if profile is not None and profile.batch_size != placement.batch_size:
        sections.append(
            "<p>The layers' times are left out: the profile that was given has micro-batches of "
            f"{profile.batch_size}, and the placement has micro-batches of "
            f"{placement.batch_size}.</p>"
        )
    # times of the same micro-batch size can be shown by device
    elif profile is not None:
        sections.append(_columns(placed_chart(placement, profile)))
    sections.append(_places(holders(placement.layer_devices, placement.replicas)))
    return sections


def _estimate(estimate: Estimate) -> list[str]:
    return [
        _list([headline(estimate), *remarks(estimate)]),
        _bars(*estimate_bars(estimate)),
        _places(estimate.layer_devices),
    ]


def _bars(title: str, rows: Sequence[Bar], text: Text) -> str:
    return f"<h2>{escape(title)}</h2>{legend(bar_keys(rows))}{drawing(title, *bars(rows, text))}"


def _places(layer_devices: Mapping[str, str]) -> str:
    return "<h2>Layers</h2>" + _table(["layer", "device"], list(layer_devices.items()))


def _columns(chart: Chart) -> str:
    keys = legend([(part.name, part.color) for part in chart.parts])
    return f"<h2>{escape(chart.title)}</h2>{keys}{drawing(chart.title, *columns(chart))}"


def legend(parts: Sequence[tuple[str, int]]) -> str:
    """Return the legend of a chart as HTML."""
    square = (
        '<svg viewBox="0 0 1 1" aria-hidden="true"><rect class="c{}" width="1" height="1"/></svg>'
    )
    return "".join(
        f'<span class="key">{square.format(color)}{escape(name)}</span>' for name, color in parts
    )


def _layers(profile: Profile) -> str:
    kinds = sorted({kind for layer in profile.layers for kind in layer.forward_ms})
    passes = ["forward_ms", "backward_ms"] if profile.training else ["forward_ms"]
    timed = [(kind, field) for kind in kinds for field in passes]
    headings = [
        "layer",
        "module",
        *(f"{field.removesuffix('_ms')} on {kind}" for kind, field in timed),
    ]
    headings += [
        "weights",
        "gradients and optimizer",
        "kept for backward",
        "left to weight passes",
        "workspace",
    ]
    rows = [
        (
            layer.name,
            layer.module,
            *(_time(getattr(layer, field).get(kind)) for kind, field in timed),
            bytes_text(layer.param_bytes + layer.buffer_bytes),
            bytes_text(layer.grad_bytes + layer.optimizer_bytes),
            bytes_text(layer.saved_bytes),
            bytes_text(layer.deferred_bytes),
            bytes_text(max(layer.forward_workspace_bytes, layer.backward_workspace_bytes)),
        )
        for layer in profile.layers
    ]
    return "<h2>Layers</h2>" + _table(headings, rows)


def _time(time_ms: float | None) -> str:
    return "-" if time_ms is None else ms_text(time_ms)


def _cluster(cluster: Cluster) -> list[str]:
    shown = plain_text(cluster_table(cluster), PAGE_WIDTH)
    return [f"<h2>Devices and links</h2><pre>{escape(shown)}</pre>"]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row in rows[:_MOST_ROWS]
    )
    more = f"<p>and {len(rows) - _MOST_ROWS} more</p>" if len(rows) > _MOST_ROWS else ""
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{more}"
    )


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines if line)}</ul>"
