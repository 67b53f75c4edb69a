"""The example of docs/notes/search.md gives the numbers that the page shows."""

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "notes" / "search.md"


def test_the_page_shows_what_its_code_prints() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)
    assert len(blocks) >= 6
    example = doctest.DocTestParser().get_doctest("".join(blocks), {}, "search.md", str(PAGE), 0)
    report: list[str] = []
    results = doctest.DocTestRunner().run(example, out=report.append)
    assert results.attempted > 30
    assert results.failed == 0, "".join(report)
