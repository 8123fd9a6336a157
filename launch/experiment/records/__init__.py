"""Records of an experiment: state, environment, proofs of freshness, records of runs."""
