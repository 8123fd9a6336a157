"""Hand-offs between real engines: identical answers, failures, joint placements."""
