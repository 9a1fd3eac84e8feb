# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM Hetero project
"""tools/tutorial.py finds a page's commands, and puts their output below them."""

from tools.tutorial import PAGE, commands, fill_in, note_time

TEXT = """\
# Page

<!-- times -->
<!-- end of times -->

```console
$ exl3 one a \\
    b

old output
$ exl3 two
```

Not these: `$ exl3 three`.

```bash
exl3 four
```

```console
$ exl3 five
kept
```
"""


def test_it_finds_commands():
    lines = [command.line for command in commands(TEXT)]
    assert lines == ["exl3 one a \\\n    b", "exl3 two", "exl3 five"]
    names = [command.name for command in commands(TEXT)]
    assert names == ["exl3 one", "exl3 two", "exl3 five"]


def test_it_replaces_one_output():
    filled = fill_in(TEXT, 1, "new\n\noutput\n")
    assert filled == TEXT.replace(
        "    b\n\nold output\n$ exl3 two", "    b\nnew\n\noutput\n\n$ exl3 two"
    )
    assert fill_in(filled, 1, "new\n\noutput\n") == filled
    assert [each.line for each in commands(filled)] == [
        each.line for each in commands(TEXT)
    ]
    assert "$ exl3 five\nother\n```" in fill_in(TEXT, 3, "other")


def test_it_notes_times_up_to_a_command():
    text = note_time(TEXT, 1, "exl3 one", 1.4, 2.0)
    text = note_time(text, 2, "exl3 two", 3.0, 5.6)
    assert "| 1 | `exl3 one` | 1 | 2 |\n| 2 | `exl3 two` | 3 | 6 |\n<!-- end" in text
    again = note_time(text, 1, "exl3 one", 9.0, 9.0)
    assert "| 1 | `exl3 one` | 9 | 9 |\n<!-- end" in again


def test_a_command_writes_where_it_is_told(tmp_path):
    (command,) = commands("```console\n$ echo build/tutorial/x docs/tutorial/y\n```\n")
    done = command.run("--json", work="/w", plots="/p")
    assert done.stdout == "/w/x /p/y --json\n"


def test_every_command_of_the_page_has_its_output():
    page = PAGE.read_text()
    shown = commands(page)
    assert len(shown) == 8
    # One row a command, below the two of the table's head.
    times = page.partition("<!-- times -->\n")[2].partition("<!-- end")[0]
    assert [row.split("`")[1] for row in times.splitlines()[2:]] == [
        command.name for command in shown
    ]
