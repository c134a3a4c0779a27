"""A program: prints where the time of a run goes, by tier and topic, from the file that ``make test`` has written.

``python -m tests.support.times outputs/tests.xml``
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree


def table(report: Path) -> str:
    """Returns a table in Markdown: topic, number of tests, and seconds, added over all workers."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        if not case.attrib["classname"]:  # a file that is skipped as a whole
            continue
        _, *folders, _ = case.attrib["classname"].split(".")  # tests.TIER.TOPIC.FILE
        seconds["/".join(folders)].append(float(case.attrib["time"]))
    rows = [(topic, len(of_topic), sum(of_topic)) for topic, of_topic in sorted(seconds.items())]
    rows.append(("all", sum(number for _, number, _ in rows), sum(total for *_, total in rows)))
    return "\n".join(
        ["| topic | tests | seconds |", "|---|---:|---:|", *(f"| {t} | {n} | {s:.0f} |" for t, n, s in rows)]
    )


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
