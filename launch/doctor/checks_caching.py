"""Checks of what makes prefix caching fail without any error: engine flags that disagree, and a proxy's conditions."""

from __future__ import annotations

from collections.abc import Iterator

from launch.doctor.checks_engines import flag
from launch.doctor.facts import Facts, FleetEngineFacts
from launch.doctor.findings import Result, check, note, ok, warning


@check(
    "cache-reports",
    looks_at="--no-enable-prefix-caching and --enable-prompt-tokens-details of the fleet's vLLM engines",
    why="without the one no prompt is ever cached, without the other no answer reports it: both look like zero hits",
    worst="warning",
)
def cache_reports(facts: Facts) -> Iterator[Result]:
    """Engines cache prefixes, and report it."""
    engines = _vllm(facts)
    off = [one.name for one in engines if "--no-enable-prefix-caching" in one.command]
    silent = [one.name for one in engines if "--enable-prompt-tokens-details" not in one.command]
    if off:
        yield warning(f"{', '.join(off)}: prefix caching is disabled", "set vllm.prefix_caching: true")
    if silent:
        yield warning(
            f"{', '.join(silent)}: answers report no cached tokens",
            "start them with --enable-prompt-tokens-details (vllm.prompt_tokens_details: true)",
        )
    if engines and not off and not silent:
        yield ok("every engine caches prefixes and reports cached tokens")


@check(
    "equal-blocks",
    looks_at="PYTHONHASHSEED and --block-size of the fleet's vLLM engines",
    why="engines of different seeds or block sizes share no KV by hash, and report no error",
    worst="warning",
)
def equal_blocks(facts: Facts) -> Iterator[Result]:
    """Engines cut and hash prompts alike."""
    engines = _vllm(facts)
    if len(engines) < 2:
        return
    seeds = {one.environment.get("PYTHONHASHSEED") for one in engines}
    sizes = {flag(one.command, "--block-size") for one in engines}
    if len(seeds) > 1:
        shown = ", ".join(f"{one.name} {one.environment.get('PYTHONHASHSEED', 'unset')}" for one in engines)
        yield warning(f"PYTHONHASHSEED differs: {shown}", "start every engine with the same one (vllm.hash_seed)")
    elif seeds <= {None, "random"}:
        yield note("PYTHONHASHSEED is not set: block hashes differ between engines", "set it if they share KV by hash")
    if len(sizes) > 1:
        shown = ", ".join(f"{one.name} {flag(one.command, '--block-size') or 'default'}" for one in engines)
        yield warning(f"--block-size differs: {shown}", "start every engine with the same one (vllm.block_size)")
    if len(seeds) == len(sizes) == 1 and not seeds <= {None, "random"}:
        yield ok("every engine has the same hash seed and block size")


@check(
    "conditions",
    looks_at="the conditions that a running proxy lists (`GET /ready?verbose` of the fleet's proxy, or of `--proxy`)",
    why="silent KV events, stripped headers and wrong predictions show in no error, only in traffic",
    worst="warning",
)
def proxy_conditions(facts: Facts) -> Iterator[Result]:
    """The running proxy finds nothing wrong."""
    proxy = facts.proxy
    if proxy is None:
        return
    if proxy.error is not None:
        unknown = f"the proxy at {proxy.url} {proxy.error}: its conditions are not known"
        yield note(unknown) if proxy.remedy is None else warning(unknown, proxy.remedy)
        return
    bad = [one for one in proxy.conditions if not one.ok]
    for one in bad:
        yield warning(f"{one.name}: {one.detail}", one.remedy or "see docs/meters.md")
    if not bad:
        yield ok(f"all {len(proxy.conditions)} conditions of the proxy at {proxy.url} are ok")


def _vllm(facts: Facts) -> list[FleetEngineFacts]:
    return [one for one in (facts.fleet.engines if facts.fleet else ()) if one.kind == "vllm"]
