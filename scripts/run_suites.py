#!/usr/bin/env python3
"""Runs test suites one after another and ends with a table.

Each suite is a line `name | JUnit file or - | command` of standard input. A suite fails when its command does, when its JUnit file
reports a failure, or when the file says that no test ran. Exit status 1 when any suite failed.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree


def count(report: pathlib.Path) -> tuple[int, int, int, list[str]]:
    """Passed, failed and skipped tests of a JUnit file, and why tests were skipped."""
    passed = failed = skipped = 0
    reasons: list[str] = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif skip is not None:
            skipped += 1
            text = skip.get("message") or skip.text or "no reason given"
            # GoogleTest puts the place before the reason.
            reasons.append(re.sub(r"^\S+:\d+\s+", "", text).strip().splitlines()[0])
        elif case.get("status") == "notrun":
            continue
        else:
            passed += 1
    return passed, failed, skipped, reasons


def main() -> int:
    rows = []
    reasons: dict[str, int] = {}
    suites = [tuple(part.strip() for part in line.split("|", 2)) for line in sys.stdin if line.strip()]
    for name, report_name, command in suites:
        print(f"==> {name}: {command}", flush=True)
        report = None if report_name == "-" else pathlib.Path(report_name)
        if report is not None:
            report.unlink(missing_ok=True)
        start = time.monotonic()
        status = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL).returncode
        seconds = time.monotonic() - start
        counts = ("", "", "")
        ok = status == 0
        if report is not None:
            if report.exists():
                passed, failed, skipped, why = count(report)
                counts = (str(passed), str(failed), str(skipped))
                ok = ok and failed == 0 and passed > 0
                for reason in why:
                    reasons[reason] = reasons.get(reason, 0) + 1
            else:
                ok = False
        rows.append((name, "ok" if ok else f"FAILED ({status})", *counts, f"{seconds:.1f}"))

    head = ("suite", "result", "passed", "failed", "skipped", "seconds")
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    print()
    for row in [head, tuple("-" * width for width in widths), *rows]:
        cells = [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())
    if reasons:
        print("\nskipped because:")
        for reason, number in sorted(reasons.items()):
            print(f"  {number} x {reason}")
    return 0 if all(row[1] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
