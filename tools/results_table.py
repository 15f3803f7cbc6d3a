"""Every Markdown table of the study, from its results file.

    python tools/results_table.py                      # all tables
    python tools/results_table.py headline rates       # some of them
    python tools/results_table.py --write              # into docs/study.md and README.md, between their marks

A mark is `<!-- table:NAME -->`, its end `<!-- /table -->`. A table whose runs are not all made says how many are.
Likewise for the figures of `plot_study.py`: `<!-- figure:NAME: what it shows -->` and `<!-- /figure -->`; one that is not drawn
says so. Needs `pip install 'lit-asyncrl[plot]'`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from plot_study import FIGURES
from study_grid import ROOT
from study_results import RESULTS, Results
from study_signal_tables import alarms, baselines, bias, gac_acting, gac_cosine, pace, ranking
from study_tables import best_rates, claims, effort, headline, opob, rates, sparse, tasks, tic_gmc, warm

FOLDER = RESULTS.parent
DOCUMENTS = (ROOT / "docs" / "study.md", ROOT / "README.md")
FIGURE = re.compile(r"(<!-- figure:(\w+): ([^\n]*?) -->\n)(?:(?!<!-- figure:).)*?(<!-- /figure -->)", flags=re.DOTALL)
MARK = re.compile(r"(<!-- table:(\w+) -->\n)(?:(?!<!-- table:).)*?(<!-- /table -->)", flags=re.DOTALL)
TABLES: dict[str, Callable[[Results], str]] = {
    f.__name__: f
    for f in (
        effort,
        warm,
        headline,
        claims,
        sparse,
        rates,
        best_rates,
        alarms,
        ranking,
        gac_cosine,
        gac_acting,
        tic_gmc,
        bias,
        opob,
        baselines,
        tasks,
        pace,
    )
}


def figure(document: Path, name: str, shows: str) -> str:
    """The Markdown of a figure, if it is drawn, and what it is made of, as the file says itself."""
    path, command = FOLDER / f"{name}.png", f"`python tools/plot_study.py {name}`"
    if not path.is_file():
        return f"*not drawn yet ({command})*"
    with Image.open(path) as image:
        made_of = image.info["Description"]
    return f"![{shows}]({path.relative_to(document.parent).as_posix()})\n\n*{shows}: {command}; {made_of}.*"


def write(document: Path, results: Results) -> int:
    """Replace the tables and figures between a document's marks. Returns the number of tables.

    Raises:
        SystemExit: a mark names no table or figure, or has no end.
    """
    text = document.read_text(encoding="utf-8")
    for kind, mark in (("table", MARK), ("figure", FIGURE)):
        if not len(mark.findall(text)) == text.count(f"<!-- {kind}:") == text.count(f"<!-- /{kind} -->"):
            raise SystemExit(f"{document.name}: each `<!-- {kind}:NAME ... -->` must be followed by its `<!-- /{kind} -->`.")
    for mark, known in ((MARK, TABLES), (FIGURE, FIGURES)):
        if unknown := [found[1] for found in mark.findall(text) if found[1] not in known]:
            raise SystemExit(f"{document.name}: marks must name one of {', '.join(known)}, got {', '.join(unknown)}.")
    new, number = MARK.subn(lambda found: f"{found[1]}\n{TABLES[found[2]](results)}\n\n{found[3]}", text)
    new = FIGURE.sub(lambda found: f"{found[1]}\n{figure(document, found[2], found[3])}\n\n{found[4]}", new)
    if new != text:
        document.write_text(new, encoding="utf-8")
    return number


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="NAME", help=f"one of {', '.join(TABLES)}; default: all")
    parser.add_argument("--write", action="store_true", help="replace the tables in the documents")
    parser.add_argument("--results", type=Path, default=RESULTS, help="results file (default: %(default)s)")
    given = parser.parse_args()
    if unknown := [name for name in given.tables if name not in TABLES]:
        parser.error(f"NAME must be one of {', '.join(TABLES)}, got {', '.join(unknown)}")
    results = Results(given.results)
    if given.write:
        for document in DOCUMENTS:
            print(f"{document}: {write(document, results)} tables")
    else:
        for name in given.tables or TABLES:
            print(f"{name}\n\n{TABLES[name](results)}\n")


if __name__ == "__main__":
    main()
