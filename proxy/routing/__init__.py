"""Live routing: the routing session with a clock, admission with its bounded queue, and the retry budget."""
