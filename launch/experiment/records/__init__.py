"""What an experiment keeps: state, environment, proofs of freshness, records of runs."""
