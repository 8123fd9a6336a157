"""vLLM and Mooncake on the CPU for tests on real engines: installation, CPU adaptation, a tiny model."""
