"""Load generation: trace formats, sampling, synthetic traces, prompts, replay, records, reports, comparison."""
