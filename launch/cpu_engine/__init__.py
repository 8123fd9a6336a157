"""vLLM and Mooncake on the CPU: installed, adapted to it, and given a tiny model, for tests on real engines."""
