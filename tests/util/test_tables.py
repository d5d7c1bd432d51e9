"""One table in every format, with unknown values, a marked row and names that look like HTML."""

import re
from html.parser import HTMLParser

from harness.util.document import Document, Figure, Markup, to_html
from harness.util.tables import Column, Table, columns_of, to_csv, to_text
from harness.util.words import seconds

TABLE = Table(
    (
        Column("point", "run"),
        Column("rate", "tokens/s", ",.1f"),
        Column("time", "time", seconds),
        Column("empty", "nothing", ".1f"),
        Column("right", "right"),
    ),
    [
        {"point": "tp=1", "rate": 1008.0, "time": 0.25, "right": True, "hidden": 1},
        {"point": "a|b <img>", "rate": None, "time": 2, "empty": "", "right": False},
    ],
    "Runs",
    ["Of `a` < b.", "- one\n- two"],
    marked="tp=1",
)
MARKDOWN = """\
# made

- the fastest: `tp=1`

## Runs

Of `a` < b.

- one
- two

| run | tokens/s | time | right |
|---|---:|---:|---|
| **tp=1** | 1,008.0 | 250 ms | yes |
| a\\|b &lt;img> | – | 2.00 s | no |

![A picture](made.png)

A `curve`.
"""


def test_text():
    assert to_text(TABLE, "  ").splitlines() == [
        "  run        tokens/s    time  right",
        "  tp=1        1,008.0  250 ms  yes",
        "  a|b <img>         –  2.00 s  no",
        "  Of `a` < b.",
        "  - one",
        "- two",
    ]
    assert to_text(Table(TABLE.columns, [])) == ""
    columns = columns_of("""
        a  the a  .1f
        b  b      gib
        c  c
    """)
    row = {"a": 1, "b": 2**30, "c": "x"}
    assert to_text(Table(columns, [row])) == "the a     b  c\n  1.0  1.00  x\n"


def test_csv_has_the_values():
    assert to_csv(TABLE.rows) == (
        "point,rate,time,right,hidden,empty\ntp=1,1008.0,0.25,True,1,\na|b <img>,,2,False,,\n"
    )
    assert to_csv(TABLE.rows, TABLE.columns[:2]) == "point,rate\ntp=1,1008.0\na|b <img>,\n"


class Tags(HTMLParser):
    """Check that tags are closed, and collect links."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.links = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open += [tag] if tag not in ("meta", "img") else []
        self.links += [value for name, value in attrs if name in ("href", "src")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_document(tmp_path):
    (tmp_path / "made.png").write_bytes(b"\x89PNG")
    made = Document(
        "made",
        ["the fastest: `tp=1`"],
        [TABLE, Figure("made.png", "A picture"), Markup("<p>&lt;</p>", "A `curve`.")],
        TABLE.rows,
    )
    names = ("made.md", "made.csv", "made.html")
    assert made.write(tmp_path, *names) == [str(tmp_path / name) for name in (*names, "made.png")]
    assert (tmp_path / "made.md").read_text() == MARKDOWN
    assert (tmp_path / "made.csv").read_text() == to_csv(TABLE.rows)
    page = (tmp_path / "made.html").read_text()
    # The page fetches nothing; rows are sorted by value, not by formatted text.
    assert [link for link in Tags(page).links if link] == ["data:image/png;base64,iVBORw=="]
    assert re.findall(r"<h\d>(.*)</h\d>", page) == ["made", "Runs"]
    assert re.findall(r'data-value="(.*?)">(.*?)<', page)[:4] == [
        ("tp=1", "tp=1"),
        ("1008.0", "1,008.0"),
        ("0.25", "250 ms"),
        ("True", "yes"),
    ]
    assert page.count('<tr class="marked">') == 1 and "<p>Of <code>a</code> &lt; b.</p>" in page
    assert "<ul><li>one</li><li>two</li></ul>" in page and "a|b &lt;img&gt;" in page
    assert "<p>&lt;</p>" in page and "A `curve`" not in page
    assert to_html("<b>", [], tmp_path).count("&lt;b&gt;") == 2
