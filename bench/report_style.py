"""The report's style sheet: readable on light and dark pages, and on paper."""

STYLE = """
:root { color-scheme: light dark;
  --page: #ffffff; --card: #f6f7f9; --ink: #1c1f24; --quiet: #5b6470; --line: #d9dde3; --grid: #e6e9ee; --band: #eef2f7;
  --bad: #b3261e; --bad-back: #fdecea; --good: #1b6e3c; --good-back: #e7f5ec; --mark: #7a828d;
  --s0: #0b4f8a; --s1: #d9680b; --s2: #1a7f4b; --s3: #a0357a; --s4: #4f9fd1; --s5: #6b6b6b; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171b; --card: #1c2026; --ink: #e6e9ee; --quiet: #9aa4b1; --line: #333a44; --grid: #272d35; --band: #1d232b;
  --bad: #ff8a80; --bad-back: #3a1d1b; --good: #7bd69f; --good-back: #17301f; --mark: #8a94a1;
  --s0: #6fb5f5; --s1: #ffab5c; --s2: #6ed39b; --s3: #ea94c8; --s4: #b5dcf7; --s5: #b9bec6; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1360px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 44px 0 10px; padding-bottom: 6px; border-bottom: 1px solid var(--line); }
h3 { font-size: 15px; margin: 22px 0 6px; }
p { margin: 6px 0; max-width: 100ch; }
.quiet, .sub { color: var(--quiet); } .sub { font-size: 13px; }
code { font: 12.5px ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.verdicts { display: grid; gap: 8px; margin: 16px 0; padding: 0; list-style: none; }
.verdicts > li { border-left: 5px solid; border-radius: 4px; padding: 8px 14px; }
.verdicts > li.good { border-color: var(--good); background: var(--good-back); }
.verdicts > li.bad { border-color: var(--bad); background: var(--bad-back); }
.verdicts b.word { margin-right: 8px; letter-spacing: .03em; } .good > b.word { color: var(--good); } .bad > b.word { color: var(--bad); }
.verdicts ul { margin: 4px 0 0; padding-left: 20px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; margin: 8px 0 16px; }
.card { background: var(--card); border-radius: 6px; padding: 10px 14px; } .card .what { color: var(--quiet); font-size: 12.5px; }
.card .value { font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.3; white-space: nowrap; }
.card .sub { font-size: 12px; font-variant-numeric: tabular-nums; }
.name { font-weight: 600; margin: 14px 0 0; display: flex; align-items: center; gap: 8px; flex-wrap: wrap; }
.scroll { overflow-x: auto; margin: 8px 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
caption { text-align: left; color: var(--quiet); font-size: 13px; padding: 0 0 6px; }
th, td { padding: 5px 10px; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { color: var(--quiet); font-weight: 600; font-size: 12.5px; vertical-align: bottom; }
td.n, th.n { text-align: right; white-space: nowrap; } td .sub { display: block; font-size: 12px; line-height: 1.2; white-space: nowrap; }
.thin { position: absolute; }
.figures tr:has(.tag) td.n, .figures tr:has(td.of-void) td.n { color: var(--quiet); text-decoration: line-through; }
tbody.group { border-top: 2px solid var(--line); } tbody th { font-weight: 600; white-space: nowrap; } td.all { color: var(--quiet); padding-left: 46px; }
td.text { overflow-wrap: anywhere; min-width: 90px; } tr.differs td { font-weight: 600; } .warn { color: var(--bad); }
.tag { background: var(--bad); color: var(--page); border-radius: 3px; font-size: 11px; font-weight: 700; padding: 1px 5px; letter-spacing: .04em; }
.charts { margin-top: 18px; display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 26px 28px; }
figure { margin: 0; min-width: 0; break-inside: avoid; display: grid; grid-template-rows: subgrid; grid-row: span 3; gap: 0; } figcaption b { display: block; }
figure svg { display: block; width: 100%; height: auto; }
ul.legend { list-style: none; margin: 4px 0 2px; padding: 0; display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; min-height: 1.5em; }
ul.legend li { overflow-wrap: anywhere; }
svg.swatch { display: inline-block; width: 30px; height: 10px; margin-right: 6px; flex: none; }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); }
.s4 { --c: var(--s4); } .s5 { --c: var(--s5); } .ink { --c: var(--quiet); }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; } .ink .line { stroke-width: 1.4; }
.whisker { fill: none; stroke: var(--c); stroke-width: 1.2; opacity: .6; } .dot { fill: var(--c); } .cross { fill: none; stroke: var(--c); stroke-width: 2; }
.grid { fill: none; stroke: var(--grid); stroke-width: 1; } .axis { fill: none; stroke: var(--quiet); stroke-width: 1; } .band { fill: var(--band); }
.mark { fill: none; stroke: var(--mark); stroke-width: 1.2; stroke-dasharray: 3 3; }
svg text { font-family: inherit; fill: var(--quiet); } .tick { font-size: 12px; font-variant-numeric: tabular-nums; } .name-of-axis { font-size: 12.5px; }
.mark-name { font-size: 12px; font-weight: 600; paint-order: stroke; stroke: var(--page); stroke-width: 3px; }
details > summary { cursor: pointer; color: var(--quiet); margin: 10px 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; font-size: 14px; } dt { font-weight: 600; } dd { margin: 0; }
@media print { main { max-width: none; padding: 0; } .scroll { overflow: visible; } }
""".strip()
