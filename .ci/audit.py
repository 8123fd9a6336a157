"""Known vulnerabilities in what requirements.lock pins: ``python .ci/audit.py [LOCK [IGNORED]]``.

Runs pip-audit. Exit code 1 for a vulnerability that .ci/audit-ignored.txt does not name, or for a broken audit; 0 when
there is none, and 0 with a clear word when the advisories could not be reached, which says nothing about the code.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
UNREACHABLE = re.compile(
    r"ConnectionError|ConnectTimeout|ReadTimeout|Max retries exceeded|NameResolutionError|Connection refused|timed out|"
    r"Could not connect|ProxyError|50[0234] Server Error"
)
_IGNORED_LINE = re.compile(r"(?P<id>[A-Z]+-[\w-]+)\s+(?P<reason>\S.*)")


class Verdict(NamedTuple):
    """What to say, and the exit code."""

    lines: list[str]
    code: int


def read_ignored(path: Path) -> dict[str, str]:
    """Advisory to reason. Raises ValueError for a line without a reason."""
    ignored: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _IGNORED_LINE.fullmatch(text)
        if match is None:
            raise ValueError(f"{path}: {line!r} is not 'ADVISORY REASON'")
        ignored[match["id"]] = match["reason"]
    return ignored


def judge(stdout: str, stderr: str, ignored: dict[str, str]) -> Verdict:
    """Read pip-audit's answer. Its exit code is no help: 1 may be a lack of network, 0 that nothing was audited."""
    try:
        dependencies: list[dict[str, Any]] = json.loads(stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = stderr.strip().splitlines()[-1:] or ["no output"]
        if UNREACHABLE.search(stderr):
            return Verdict([f"advisories could not be reached, so nothing was audited: {last[0][:300]}"], 0)
        return Verdict([f"pip-audit failed: {stderr.strip()[-2000:] or 'no output'}"], 1)
    skipped = [each["name"] for each in dependencies if "skip_reason" in each]
    audited = [each for each in dependencies if "skip_reason" not in each]
    if not audited:
        return Verdict(
            [f"advisories could not be reached, so nothing was audited: the index knows none of {len(skipped)} pins"], 0
        )
    lines, found, seen = [], 0, set()
    for package in audited:
        for vulnerability in package.get("vulns", []):
            names = {vulnerability["id"], *vulnerability.get("aliases", [])}
            seen |= names
            excuse = next((ignored[name] for name in sorted(names) if name in ignored), None)
            fixed = ", ".join(vulnerability.get("fix_versions", [])) or "no version yet"
            what = f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in {fixed}"
            lines.append(f"{what} (ignored: {excuse})" if excuse else f"VULNERABLE {what}")
            found += excuse is None
    lines += [f"no longer reported, take it out of the ignored: {name}" for name in sorted(set(ignored) - seen)]
    if skipped:
        lines.append(f"not audited, since the index does not know them: {', '.join(skipped)}")
    lines.append(f"{len(audited)} packages audited, {found} vulnerable")
    return Verdict(lines, 1 if found else 0)


def main(lock: Path = HERE.parent / "requirements.lock", ignored: Path = HERE / "audit-ignored.txt") -> int:
    """Run and judge."""
    try:
        excuses = read_ignored(ignored)
    except ValueError as error:
        print(error)
        return 1
    command = [sys.executable, "-m", "pip_audit", "--require-hashes", "--disable-pip", "--progress-spinner", "off"]
    try:
        done = subprocess.run(
            [*command, "--format", "json", "--requirement", str(lock)],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print("advisories could not be reached, so nothing was audited: no answer within 300 s")
        return 0
    verdict = judge(done.stdout, done.stderr, excuses)
    print("\n".join(verdict.lines))
    return verdict.code


if __name__ == "__main__":
    sys.exit(main(*(Path(argument) for argument in sys.argv[1:])))
