"""Generated blocks in Markdown are found and filled, wrong marks are errors, and the text of a cell cannot leave its
table."""

from __future__ import annotations

import pytest

from envbuild.report import markdown_generated_sections
from envbuild.report.markdown_generated_sections import Block

TEXT = """# Title
<!-- envbuild:table h20, a100 -->
old
<!-- envbuild:end -->
~~~~
<!-- envbuild:table in-a-fence -->
~~~
~~~~
  <!--envbuild:minimum h20-->
  <!-- envbuild:end -->
a line with <!-- envbuild:table h20 --> in it
"""


def test_blocks_are_found_outside_fences_and_alone_on_their_lines() -> None:
    assert markdown_generated_sections.blocks(TEXT, "a.md") == (
        [Block("table", ("h20", "a100"), 1, 3), Block("minimum", ("h20",), 8, 9)],
        [],
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<!-- envbuild:end -->", ["a.md:1: this end marker has no start marker"]),
        ("\n<!-- envbuild:table h20 -->", ["a.md:2: this block has no end marker: add <!-- envbuild:end -->"]),
        (
            "<!-- envbuild:tabel h20 -->",
            ["a.md:1: unknown block 'tabel' (did you mean table?)"],
        ),
        (
            "<!-- envbuild:table -->\n<!-- envbuild:table h20 -->\n<!-- envbuild:end -->",
            [
                "a.md:1: this marker lacks profiles: write envbuild:table A,B",
                "a.md:1: this block has no end marker: add <!-- envbuild:end -->",
            ],
        ),
    ],
)
def test_all_faults_come_at_once(text: str, expected: list[str]) -> None:
    assert [str(fault) for fault in markdown_generated_sections.blocks(text, "a.md")[1]] == expected


def test_code_within_a_line_opens_no_fence() -> None:
    text = "```code``` text\n<!-- envbuild:table h20 -->\n<!-- envbuild:end -->"
    assert markdown_generated_sections.blocks(text, "a.md") == ([Block("table", ("h20",), 1, 2)], [])


def test_a_fence_that_is_never_closed_hides_no_marker_in_silence() -> None:
    text = "\n~~~ text\n<!-- envbuild:table h20 -->\n<!-- envbuild:end -->\n```"
    (fault,) = markdown_generated_sections.blocks(text, "a.md")[1]
    assert str(fault) == "a.md:2: this code fence is not closed, so the markers below it are not read"
    assert markdown_generated_sections.blocks("```\nno marker", "a.md") == ([], [])


def test_filling_changes_the_content_alone_and_is_done_once() -> None:
    found, _ = markdown_generated_sections.blocks(TEXT, "a.md")
    filled, changed = markdown_generated_sections.fill_blocks(TEXT, found, lambda block: f"new {block.kind}\nlines")
    assert changed == found
    assert filled == TEXT.replace("old\n", "new table\nlines\n").replace("h20-->\n", "h20-->\nnew minimum\nlines\n")
    again, _ = markdown_generated_sections.blocks(filled, "a.md")
    assert markdown_generated_sections.fill_blocks(filled, again, lambda block: f"new {block.kind}\nlines") == (
        filled,
        [],
    )


def test_line_ends_stay() -> None:
    text = "<!-- envbuild:table h20 -->\r\n<!-- envbuild:end -->\r\nlast"
    found, _ = markdown_generated_sections.blocks(text, "a.md")
    assert markdown_generated_sections.fill_blocks(text, found, lambda block: "x")[0] == text.replace(
        "-->\r\n<", "-->\r\nx\r\n<"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a|b", "a&#124;b"),
        ("<script>", "&#60;script>"),
        ("</b> <!--", "&#60;/b> &#60;\\!--"),
        ("<2@x.example>", "&#60;2@x.example>"),
        ("<2.11,>=2 <=3", "<2.11,>=2 <=3"),
        ("two\nlines\x1b[1m", "two lines \\[1m"),
        ("*b* `c` _d_ e_f [x](y)", "\\*b\\* \\`c\\` \\_d\\_ e_f \\[x\\](y)"),
        ("-->", "-->"),
        ("&lt;", "&#38;lt;"),
        ("", "-"),
    ],
)
def test_a_cell_shows_what_it_holds_as_text(text: str, shown: str) -> None:
    assert markdown_generated_sections.cell_text(text) == shown


def test_a_hostile_cell_can_neither_begin_nor_end_a_block() -> None:
    made = markdown_generated_sections.markdown_table(
        [("head",), ("x\n<!-- envbuild:end -->\n<!-- envbuild:table h20 -->",)]
    )
    assert len(made.splitlines()) == 3
    assert markdown_generated_sections.blocks(made, "a.md") == ([], [])


@pytest.mark.parametrize(
    "line",
    ["<!-- envbuild:table" + " " * 100_000, "<!-- envbuild:" + "x" * 100_000, "<!--" + "\t" * 100_000 + "envbuild:",
     "<!-- envbuild:table " + "h20 " * 25_000, "<!-- envbuild:table" + " --" * 30_000],
    ids=["blanks", "kind", "before", "names", "dashes"],
)  # fmt: skip
def test_a_long_line_that_is_nearly_a_marker_takes_no_time(line: str) -> None:
    """Each line is read in less than a second if the time is linear in the length; with quadratic time, reading takes
    minutes."""
    assert markdown_generated_sections.blocks(line, "x") == ([], [])
