"""The table of instances, their health state and their circuit breakers."""
