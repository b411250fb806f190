"""The page's style sheet: light and dark, wide and narrow. Colours are those of Okabe and Ito, told apart by everybody."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root{color-scheme:light dark;--ink:#1d2330;--dim:#667085;--line:#e3e7ee;--card:#fff;--page:#f5f7fa;--bar:#0072b2;
--good:#047857;--bad:#c0262d}
@media(prefers-color-scheme:dark){:root{--ink:#e8ebf1;--dim:#98a2b3;--line:#2d3442;--card:#1a202c;--page:#11151d;
--bar:#56b4e9;--good:#34d399;--bad:#f87171}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:14px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1320px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:17px;margin:28px 0 10px}h3{font-size:14px;margin:0 0 8px;font-weight:600}
header p{margin:2px 0;overflow-wrap:anywhere}.dim{color:var(--dim)}.card>p.dim{margin:8px 0 0;font-size:12.5px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));gap:10px;margin-top:16px}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:8px}
.tile{padding:10px 12px}.tile b{display:block;font-size:18px;white-space:nowrap;font-variant-numeric:tabular-nums}
.tile span{color:var(--dim);font-size:12.5px}.good b{color:var(--good)}.bad b{color:var(--bad)}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,360px),1fr));gap:12px}
.card{padding:12px 14px;min-width:0}.wide{grid-column:1/-1}
svg{display:block;width:100%;height:auto;font-size:11px}svg text{fill:var(--dim)}
.grid{stroke:var(--line);stroke-width:1}.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.dashed{stroke-dasharray:5 4}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;margin-bottom:4px;font-size:12.5px}
.key i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.line.c0{stroke:#0072b2}.line.c1{stroke:#e69f00}.line.c2{stroke:#009e73}.line.c3{stroke:#cc79a7}
.line.c4{stroke:#56b4e9}.line.c5{stroke:#d55e00}.line.c6{stroke:#b3a600}.line.c7{stroke:#7a7f87}
.dot.c0{fill:#0072b2}.dot.c1{fill:#e69f00}.dot.c2{fill:#009e73}.dot.c3{fill:#cc79a7}
.dot.c4{fill:#56b4e9}.dot.c5{fill:#d55e00}.dot.c6{fill:#b3a600}.dot.c7{fill:#7a7f87}
i.c0{background:#0072b2}i.c1{background:#e69f00}i.c2{background:#009e73}i.c3{background:#cc79a7}
i.c4{background:#56b4e9}i.c5{background:#d55e00}i.c6{background:#b3a600}i.c7{background:#7a7f87}
.bar{display:grid;grid-template-columns:minmax(90px,38%) 1fr auto;gap:10px;align-items:center;margin:5px 0}
.bar .name{overflow-wrap:anywhere}.bar .value{font-variant-numeric:tabular-nums;min-width:3ch;text-align:right}
.track{background:var(--line);border-radius:3px;height:10px;overflow:hidden}.track i{display:block;height:100%;background:var(--bar)}
table{border-collapse:collapse;width:100%;font-size:13px}th{text-align:left;color:var(--dim);font-weight:500;white-space:nowrap}
th,td{padding:4px 14px 4px 0;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
tbody tr:last-child td{border-bottom:0}.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.alarm{border-left:4px solid var(--bad)}.alarm td:first-child{font-weight:600;color:var(--bad);white-space:nowrap}
.none{color:var(--dim);margin:0}
@media(max-width:640px){main{padding:14px 10px 32px}.wide thead{display:none}
.wide tr{display:block;padding:8px 0;border-bottom:1px solid var(--line)}.wide tbody tr:last-child{border-bottom:0}
.wide td{display:flex;justify-content:space-between;gap:16px;border:0;padding:1px 0;text-align:right;white-space:normal}
.wide td:first-child{font-weight:600;text-align:left}.wide td:first-child::before{content:none}
.wide td::before{content:attr(data-name);color:var(--dim);font-weight:400;text-align:left;white-space:nowrap}}
@media print{body{background:#fff}.card,.tile{break-inside:avoid}}
""".strip()
